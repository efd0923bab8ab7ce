"""More loops of the equality table: they read or change parameters, gradients and state that may be in flight."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from equality_models import convnet, mlp
from equality_table import case, plain, train
from equality_ways import Run, tensors
from torch import nn
from torch.optim.swa_utils import AveragedModel


@case(core=True, optimizers=("sgd",))
def ema_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(_step: int) -> None:
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.mul_(0.9).add_(p.detach(), alpha=0.1)
        run.read(average[-1])

    train(run, model, optimizer, net, after=follow)
    run.read(*average)


@case(optimizers=("adamw",))
def ema_by_foreach(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(_step: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)

    train(run, model, optimizer, net, after=follow)
    run.read(*average)


@case(optimizers=("sgd",))
def averaged_model(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = AveragedModel(model)
    train(run, model, optimizer, net, after=lambda _step: average.update_parameters(model))
    run.read(*average.parameters(), average(run.batch(0)[0]))


@case(core=True, optimizers=("adamw",))
def state_dict_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(
        run, model, optimizer, net, after=lambda _step: run.read(*(t.clone() for t in model.state_dict().values()))
    )  # fmt: skip


@case()
def optimizer_state_dict_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(
        run, model, optimizer, net, after=lambda _step: run.read(*tensors(optimizer.state_dict()["state"]))
    )  # fmt: skip


@case()
def optimizer_state_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, model, optimizer, net, after=lambda _step: run.read(*tensors(optimizer.state[model[0].weight])))


@case(optimizers=("adamw",))
def saved_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def save(step: int) -> None:
        file = io.BytesIO()
        torch.save(model.state_dict() if step % 2 else list(model.parameters()), file)
        file.seek(0)
        run.read(*tensors(torch.load(file, weights_only=True)))

    train(run, model, optimizer, net, after=save)


@case()
def loaded_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    kept: list[Any] = []

    def go_back(step: int) -> None:
        if step == 5:
            kept.extend((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        elif step == 12:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        elif step == 15:
            optimizer.load_state_dict(kept[1])

    train(run, model, optimizer, net, after=go_back)


@case(optimizers=("adamw",))
def evaluation_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.read(model(run.batch(step, 9)[0]))
        model.train()

    train(run, model, optimizer, net, after=evaluate)


@case(optimizers=("sgd",))
def evaluation_with_batchnorm(run: Run) -> None:
    model, optimizer, net = plain(run, convnet)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            out = model(run.batch(step, 9, shape=(6, 3, 8, 8))[0])
        # Rank 0's alone: whether another rank evaluates with its own statistics or rank 0's is not DDP's promise.
        run.seen["reads"].append(out.clone()) if run.rank == 0 else None
        model.train()

    train(run, model, optimizer, net, after=evaluate, shape=(6, 3, 8, 8))


@case(optimizers=("sgd",))
def values_read_by_python(run: Run) -> None:
    model, optimizer, net = plain(run)

    def look(step: int) -> None:
        bias, weight = model[6].bias, model[0].weight
        ways: list[Callable[[], Any]] = [
            lambda: bias.tolist(),
            lambda: bias.detach().numpy().copy(),
            lambda: [float(bias.detach()[0]), weight[0, 0].item()],
            lambda: [bias[1].item(), weight.sum().item(), *map(float, weight[0].detach())],
            lambda: nn.utils.parameters_to_vector(model.parameters())[-40:].detach(),
        ]
        run.read(torch.as_tensor(ways[step % len(ways)]()))

    train(run, model, optimizer, net, after=look)


@case(optimizers=("sgd",))
def alias_from_before_attach(run: Run) -> None:
    model = mlp()
    alias = [p.data for p in model.parameters()]
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    train(run, model, optimizer, net, after=lambda _step: run.read(*alias))


@case(optimizers=("sgd",))
def alias_from_after_attach(run: Run) -> None:
    model, optimizer, net = plain(run)
    alias = [p.detach().view(-1)[:8] for p in model.parameters()]
    train(run, model, optimizer, net, after=lambda _step: run.read(torch.cat(alias)))


@case(optimizers=("adamw",))
def deepcopy_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def twin(step: int) -> None:
        if step % 4 == 1:
            other = copy.deepcopy(model)
            run.read(*other.parameters())
            run.read(other(run.batch(step)[0]))

    train(run, model, optimizer, net, after=twin)


@case(optimizers=("adamw",))
def parameters_edited_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clamp(step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.data.clamp_(-0.1, 0.1) if step % 2 else p.clamp_(-0.1, 0.1)

    train(run, model, optimizer, net, after=clamp)


@case(core=True, optimizers=("sgd",))
def gradients_read(run: Run) -> None:
    model, optimizer, net = plain(run)
    # Each step from another one on: what is not read is not waited for.
    some = list(model.parameters())
    train(run, model, optimizer, net, between=lambda step: run.read(*(p.grad for p in some[step % 4 :])))


@case(core=True)
def gradients_edited(run: Run) -> None:
    model, optimizer, net = plain(run)

    def edit(step: int) -> None:
        first, second, *others = model.parameters()
        first.grad.mul_(0.5)
        second.grad = second.grad + 0.01
        others[0].grad = None if step % 3 == 1 else others[0].grad
        others[-1].grad.data.add_(others[-1].data, alpha=0.01)

    train(run, model, optimizer, net, between=edit)


@case(optimizers=("sgd",))
def gradients_kept_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()
        if step % 2:
            run.read(*(p.grad for p in model.parameters()))


@case(core=True, optimizers=("adamw",))
def zero_grad_before_backward(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()


@case(optimizers=("sgd",))
def zero_grad_after_forward(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        loss = run.loss(net, step)
        model.zero_grad()
        loss.backward()
        optimizer.step()


@case(core=True, optimizers=("sgd",))
def zero_grad_to_zeros(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@case(optimizers=("adamw",))
def zero_grad_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None


@case(optimizers=("adamw",))
def waited_for_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)
    views = [p.detach().numpy() for p in model.parameters()]  # nothing can see who reads these

    def look(_step: int) -> None:
        run.way.wait()
        run.read(*(torch.from_numpy(v.copy()) for v in views))

    train(run, model, optimizer, net, after=look)
