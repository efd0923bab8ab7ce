"""Loops that save, load, resume, and read or change the optimizer's state while updates are in flight."""

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from loops.models import convnet, mlp
from loops.table import plain, row, train
from loops.ways import DEVICE, Run, tensors


def _after(run: Run, look: Callable[[int, Any, Any], Any], make: Callable[[], nn.Module] = mlp) -> None:
    model, optimizer, net = plain(run, make)
    train(run, optimizer, net, after=lambda step: look(step, model, optimizer))


@row(core=True, optimizer="adamw")
def state_dict_right_after_step(run: Run) -> None:
    _after(run, lambda _step, model, _optimizer: run.read(*(t.clone() for t in model.state_dict().values())))


@row()
def state_dict_kept(run: Run) -> None:
    """A state_dict is an alias: it shows later steps, too."""
    model, optimizer, net = plain(run)
    kept = model.state_dict()
    train(run, optimizer, net, after=lambda _step: run.read(*kept.values()))


@row(optimizer="adamw")
def optimizer_state_dict_right_after_step(run: Run) -> None:
    _after(run, lambda _step, _model, optimizer: run.read(*tensors(optimizer.state_dict()["state"])))


@row(optimizer="adamw")
def optimizer_state_right_after_step(run: Run) -> None:
    _after(run, lambda _step, model, optimizer: run.read(*tensors(optimizer.state[model[0].weight])))


@row()
def optimizer_state_values_in_parameter_order(run: Run) -> None:
    """`state.values()` has one order on every rank, so that users can all-reduce it."""

    def look(_step: int, _model: Any, optimizer: Any) -> None:
        run.read(*(state["momentum_buffer"] for state in optimizer.state.values()))

    _after(run, look)


@row(optimizer="adamw")
def optimizer_state_cleared(run: Run) -> None:
    _after(run, lambda step, _model, optimizer: optimizer.state.clear() if step == 2 else None)


@row()
def optimizer_state_popped(run: Run) -> None:
    def pop(step: int, model: Any, optimizer: Any) -> None:
        if step % 2:
            run.read(*tensors(optimizer.state.pop(model[2].weight)))

    _after(run, pop)


@row()
def optimizer_state_deleted(run: Run) -> None:
    def delete(step: int, model: Any, optimizer: Any) -> None:
        if step % 2:
            del optimizer.state[model[0].bias]

    _after(run, delete)


@row()
def optimizer_state_replaced(run: Run) -> None:
    def replace(step: int, _model: Any, optimizer: Any) -> None:
        if step == 2:
            optimizer.state = defaultdict(dict)

    _after(run, replace)


@row()
def optimizer_state_set_by_default(run: Run) -> None:
    def count(_step: int, model: Any, optimizer: Any) -> None:
        state = optimizer.state.setdefault(model[0].weight, {})
        run.read(state["momentum_buffer"])
        state["momentum_buffer"].mul_(0.5)

    _after(run, count)


@row(optimizer="adamw")
def optimizer_state_updated_and_kept(run: Run) -> None:
    """Tensors of the state that the user keeps show every step."""
    kept: list[Any] = []

    def look(step: int, model: Any, optimizer: Any) -> None:
        if step == 0:
            kept.extend([optimizer.state[model[2].weight]["exp_avg"], optimizer.state[model[2].weight]["step"]])
        run.read(*kept)

    _after(run, look)


@row()
def optimizer_state_lengths_and_copies(run: Run) -> None:
    def look(_step: int, model: Any, optimizer: Any) -> None:
        run.read(torch.tensor([len(optimizer.state), model[0].weight in optimizer.state, bool(optimizer.state)]))
        run.read(*tensors(list(copy.copy(dict(optimizer.state)).values())))

    _after(run, look)


@row()
def momentum_reset_by_hand(run: Run) -> None:
    def reset(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            for p in model.parameters():
                optimizer.state[p]["momentum_buffer"].zero_()

    _after(run, reset)


def _roundtrip(value: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@row(optimizer="adamw")
def saved_right_after_step(run: Run) -> None:
    def save(step: int, model: Any, optimizer: Any) -> None:
        value = (model.state_dict(), list(model.parameters()), optimizer.state_dict())[step % 3]
        run.read(*tensors(_roundtrip(value, weights_only=True)))

    _after(run, save)


@row()
def whole_model_saved_while_attached(run: Run) -> None:
    """`torch.save(model)` gives a plain module, which computes what the model computes."""

    def save(step: int, model: Any, _optimizer: Any) -> None:
        other = _roundtrip(model, weights_only=False)
        run.read(*other.parameters(), other(run.batch(step, 3)[0]))

    _after(run, save)


@row()
def whole_model_pickled_while_attached(run: Run) -> None:
    def save(step: int, model: Any, _optimizer: Any) -> None:
        other = pickle.loads(pickle.dumps(model))
        loss = other(run.batch(step, 3)[0]).square().mean()
        loss.backward()  # local: nobody averages these
        run.read(*(p.grad for p in other.parameters()))

    _after(run, save)


@row(optimizer="adamw")
def optimizer_pickled_while_attached(run: Run) -> None:
    def save(_step: int, _model: Any, optimizer: Any) -> None:
        other = pickle.loads(pickle.dumps(optimizer))
        run.read(*tensors(list(other.state.values())))

    _after(run, save)


@row()
def trained_copy_of_the_model(run: Run) -> None:
    """A deepcopy is a plain model: it trains by itself, without exchanges."""
    model, optimizer, net = plain(run)
    train(run, optimizer, net)
    other = copy.deepcopy(model)
    local = run.optimizer(other.parameters())
    for step in range(2):
        run.loss(other, step, 4).backward()
        local.step()
        local.zero_grad()
    run.read(*other.parameters())


@row(optimizer="adamw")
def loaded_right_after_step(run: Run) -> None:
    kept: list[Any] = []

    def go_back(step: int, model: Any, optimizer: Any) -> None:
        if step == 0:
            kept.extend((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        elif step == 2:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        elif step == 3:
            optimizer.load_state_dict(kept[1])

    _after(run, go_back)


@row()
def loaded_with_assign(run: Run) -> None:
    """`assign=True` puts other parameter objects into the model: the loop goes on with a new optimizer and attach."""
    model, optimizer, net = plain(run)
    train(run, optimizer, net)
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    run.way.leave(model)
    model.load_state_dict(kept, assign=True)
    other = run.optimizer(model.parameters())
    net = run.attach(model, other)
    train(run, other, net)


@row()
def loaded_through_data(run: Run) -> None:
    def load(step: int, model: Any, _optimizer: Any) -> None:
        if step == 2:
            saved = [torch.full_like(p, 0.01) for p in model.parameters()]
            for p, value in zip(model.parameters(), saved, strict=True):
                p.data.copy_(value)

    _after(run, load)


@row(ddp=False)
def loaded_with_swapped_parameters(run: Run) -> None:
    """`set_swap_module_params_on_conversion`: `load_state_dict` swaps the content of parameter objects."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    kept: list[Any] = []

    def load(step: int, model: Any, _optimizer: Any) -> None:
        if step == 1:
            kept.append(copy.deepcopy(model.state_dict()))
        if step == 3:
            torch.__future__.set_swap_module_params_on_conversion(True)
            model.load_state_dict(kept[0])
            torch.__future__.set_swap_module_params_on_conversion(before)

    try:
        _after(run, load)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@row(optimizer="adamw")
def state_dict_of_torch_distributed(run: Run) -> None:
    def look(_step: int, model: Any, optimizer: Any) -> None:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        run.read(*tensors(of_model), *tensors(of_optimizer["state"]))

    _after(run, look)


def _resumed(run: Run, *, codec_state: bool) -> None:
    """Half of the steps, all of it saved, and the rest with a new model, optimizer and attach."""
    model, optimizer, net = plain(run, convnet)
    shape = (6, 3, 8, 8)
    train(run, optimizer, net, shape=shape)
    saved = _roundtrip({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
    state = run.way.save(model) if codec_state else None
    run.way.leave(model)
    again = convnet().to(DEVICE[0])
    again.load_state_dict(saved["model"])
    other = run.optimizer(again.parameters())
    other.load_state_dict(saved["optimizer"])
    net = run.attach(again, other)
    if codec_state:
        run.way.load(again, state)
    for step in range(run.steps, run.steps + 3):
        run.loss(net, step, shape=shape).backward()
        other.step()
        other.zero_grad()


@row(optimizer="adamw", ddp=False, steps=3)
def resumed_with_codec_state(run: Run) -> None:
    _resumed(run, codec_state=True)


@row(steps=3)
def resumed_without_codec_state(run: Run) -> None:
    _resumed(run, codec_state=False)


@row()
def closed_and_continued_as_a_plain_loop(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, optimizer, net)
    run.way.leave(model)
    for step in range(2):
        run.loss(model, step, 5).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(optimizer="adamw")
def closed_and_attached_again(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, optimizer, net)
    run.way.leave(model)
    train(run, optimizer, run.attach(model, optimizer))


@row()
def attached_after_local_steps(run: Run) -> None:
    """Every rank has trained by itself before: rank 0's parameters are taken."""
    model = mlp().to(DEVICE[0])
    # Without momentum: ranks would keep states of their own, replicas would differ, and the sentinel would say so.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        run.loss(model, step, 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(run, optimizer, run.attach(model, optimizer))


@row()
def moved_to_another_dtype_between_attachments(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, optimizer, net)
    run.way.leave(model)
    model.double()
    other = run.optimizer(model.parameters())
    net = run.attach(model, other)
    train(run, other, lambda x: net(x.double()))
