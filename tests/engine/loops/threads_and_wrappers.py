"""Loops in which other threads, other processes, hooks and wrappers meet an attached model."""

import gc
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loops.models import mlp
from loops.table import plain, row, train
from loops.ways import DEVICE, WAYS, Run


@row()
def evaluation_in_a_thread(run: Run) -> None:
    """Another thread evaluates the model right after each step; the next step comes when it has ended."""
    model, optimizer, net = plain(run)
    seen: list[Tensor] = []

    def evaluate(step: int) -> None:
        with torch.no_grad():
            seen.append(model(run.batch(step, 9)[0]).clone())

    def start(step: int) -> None:
        thread = threading.Thread(target=evaluate, args=(step,))
        thread.start()
        thread.join()

    train(run, optimizer, net, after=start)
    run.read(*seen)


@row(optimizer="adamw")
def checkpoint_in_a_thread(run: Run) -> None:
    model, optimizer, net = plain(run)
    seen: list[Tensor] = []

    def save() -> None:
        seen.extend(t.clone() for t in model.state_dict().values())

    def start(_step: int) -> None:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    train(run, optimizer, net, after=start)
    run.read(*seen)


@row()
def training_in_a_thread(run: Run) -> None:
    _, optimizer, net = plain(run)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            train(run, optimizer, net)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not problems, problems


@row(ways=WAYS[:2], cuda=False, steps=3)
def forked_child_reads_parameters(run: Run) -> None:
    """A child that is forked with updates in flight reads a parameter: a value or an error, and no hang."""
    model, optimizer, net = plain(run)

    def fork(_step: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                float(model[0].weight.detach().sum())
            finally:
                os._exit(0)
        for _ in range(500):
            done, _status = os.waitpid(child, os.WNOHANG)
            if done:
                return
            threading.Event().wait(0.002)
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the child hung")

    train(run, optimizer, net, after=fork)


@row(cuda=False, steps=3)
def model_pickled_for_another_process(run: Run) -> None:
    """What a spawned process gets: a plain module with this step's values, in shared memory."""
    model, optimizer, net = plain(run)

    def hand_over(_step: int) -> None:
        other = pickle.loads(bytes(ForkingPickler.dumps(model)))
        run.read(*other.parameters())

    train(run, optimizer, net, after=hand_over)


@row()
def forward_hooks_registered_after_attach(run: Run) -> None:
    model, optimizer, net = plain(run)
    sums: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda m, args: sums.append(m.weight.detach().sum()))
    model[2].register_forward_hook(lambda m, args, out: out + m.bias.detach())
    train(run, optimizer, net, between=lambda _step: run.read(sums.pop()))


@row()
def forward_pre_hook_that_edits_parameters(run: Run) -> None:
    model, optimizer, net = plain(run)

    def shrink(module: nn.Module, _args: Any) -> None:
        module.weight.data.mul_(0.99)

    model[0].register_forward_pre_hook(shrink)
    train(run, optimizer, net)


class Wrapper(nn.Module):
    """A user's wrapper around an attached model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * 0.5
        return out


@row()
def wrapped_after_attach(run: Run) -> None:
    _, optimizer, net = plain(run)
    train(run, optimizer, Wrapper(net))


@row(ddp=False)
def attached_outside_and_called_inside(run: Run) -> None:
    """The loop calls a part of the attached model, never the model itself."""
    model = Wrapper(mlp())
    optimizer = run.optimizer(model.parameters())
    run.attach(model, optimizer)
    train(run, optimizer, model.inner)


@row(ddp=False)
def layers_called_one_by_one(run: Run) -> None:
    model, optimizer, _ = plain(run)

    def call(x: Tensor) -> Tensor:
        for layer in reversed(list(reversed(model))):
            x = layer(x)
        return x

    train(run, optimizer, call)


@row(ddp=False)
def forward_called_without_hooks(run: Run) -> None:
    """`model.forward(x)` and functional calls of its weights skip every module hook."""
    model, optimizer, _ = plain(run)

    def call(x: Tensor) -> Tensor:
        h = model[0].forward(x).relu()
        h = nn.functional.linear(h, model[2].weight, model[2].bias).relu()
        out: Tensor = model[6].forward(model[5](model[4].forward(h)))
        return out

    train(run, optimizer, call)


@row()
def module_replaced_mid_run(run: Run) -> None:
    """A layer is wrapped by another module; its parameters stay the same objects."""
    model, optimizer, net = plain(run)

    def replace(step: int) -> None:
        if step == 1:
            model[2] = Wrapper(model[2])

    train(run, optimizer, net, after=replace)


@row()
def engine_deleted_without_close(run: Run) -> None:
    """`del` leaves a plain model behind and no thread."""
    model, optimizer, net = plain(run)
    train(run, optimizer, net)
    run.way.wait()
    run.way.leave(model)
    del net
    gc.collect()


@row()
def attach_around_ddp_is_refused(run: Run) -> None:
    model = DistributedDataParallel(mlp().to(DEVICE[0]), process_group=run.way.group)
    run.refuses(lambda: run.attach(model, run.optimizer(model.parameters())), "DistributedDataParallel")


@row()
def attach_inside_ddp_is_refused(run: Run) -> None:
    model = mlp().to(DEVICE[0])
    outer = DistributedDataParallel(model, process_group=run.way.group)
    run.refuses(lambda: run.attach(model, run.optimizer(outer.parameters())), "DistributedDataParallel")


@row()
def attach_around_data_parallel_is_refused(run: Run) -> None:
    model = nn.DataParallel(mlp())
    run.refuses(lambda: run.attach(model, run.optimizer(model.parameters())), "DataParallel")


@row()
def training_mode_switched_every_step(run: Run) -> None:
    model, optimizer, net = plain(run, lambda: nn.Sequential(nn.Linear(32, 34), nn.Dropout(0.5), nn.Linear(34, 10)))

    def evaluate(step: int) -> None:
        model.eval()
        run.loss(model, step, 3)
        model.train()

    torch.manual_seed(3 + run.rank)
    train(run, optimizer, net, after=evaluate)


@row()
def anomaly_detection(run: Run) -> None:
    _, optimizer, net = plain(run)
    with torch.autograd.detect_anomaly(check_nan=False):
        train(run, optimizer, net)


@row()
def deterministic_algorithms(run: Run) -> None:
    _, optimizer, net = plain(run)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(run, optimizer, net)
    finally:
        torch.use_deterministic_algorithms(before)


@row()
def default_device_and_function_modes(run: Run) -> None:
    """A torch function mode of the user sees the loop's calls."""
    model, optimizer, net = plain(run)

    class Count(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    for step in range(run.steps):
        with Count():
            loss = run.loss(net, step)
        loss.backward()
        optimizer.step()
        with Count():
            run.read(model[2].weight)
        optimizer.zero_grad()
    assert Count.calls


@row()
def dispatch_mode_over_the_loop(run: Run) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    _, optimizer, net = plain(run)
    for step in range(run.steps):
        with FlopCounterMode(display=False) as counter:
            loss = run.loss(net, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.read(torch.tensor(counter.get_total_flops()))
