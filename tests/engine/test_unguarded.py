"""Reads that torch does not report, after `step()` and of `.grad` after `backward()`: the values of the plain loop."""

import json
import os
import select
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bypass_digest import digest
from torch import Tensor, nn
from touch_recipes import COLLECTIVES, RECIPES

import syncline
from ranks import run_ranks
from syncline.engine.inflight import wait_on_touch

SLOW = "loops.slow_exchange:slow(ms=2)"
ALL = {**RECIPES, **COLLECTIVES}


class Plain:
    """The plain loop: gradients are averaged by hand."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))


def reads(rank: int, world: int) -> dict[str, str]:
    """Problems by recipe: every recipe reads the gradient of a step, and then the parameter."""
    models = [tiny(), tiny()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    plan = syncline.plan.Plan(
        tuple(syncline.plan.Unit(name, (name,), exchange=SLOW) for name in ("0.weight", "2.weight")),
        (("2.weight", 0), ("0.weight", 0)),
    )
    sync = syncline.attach(models[0], optimizers[0], plan=plan, sentinel=0)
    plain = Plain(models[1], optimizers[1])
    problems = {}
    # torch warns of some of these, in the plain loop too.
    warnings.simplefilter("ignore")
    for number, (name, recipe) in enumerate(ALL.items()):
        for what in ("gradient", "parameter"):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number * world + rank))
            models[0](x).square().sum().backward()
            plain.backward(models[1](x).square().sum())
            if what == "parameter":
                for optimizer in optimizers:
                    optimizer.step()
            mine, other = (m[0].weight.grad if what == "gradient" else m[0].weight for m in models)
            pending = wait_on_touch.is_marked(mine)
            try:
                got, want = digest(recipe(mine)), digest(recipe(other))
                if got != want or not pending:
                    problems[f"{name} of a {what}"] = f"pending: {pending}, {got}, in the plain loop {want}"
            except KeyError:
                if name != "func.stack_module_state" or what == "parameter":  # a gradient is no module's parameter
                    raise
            for optimizer in optimizers:
                optimizer.zero_grad()
    sync.close()
    return problems


def test_reads_that_bypass_torch_function_are_those_of_the_plain_loop() -> None:
    for problems in run_ranks(reads, 2):
        assert not problems


def _in_child(work: Callable[[], list[float]]) -> list[float] | str:
    """The answer of a forked child, or the text of its error."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps(f"{type(error).__name__}: {error}")
        os.write(send, answer.encode())
        os._exit(0)
    os.close(send)
    ready, _, _ = select.select([receive], [], [], 20)
    if not ready:
        os.kill(child, signal.SIGKILL)
    answer = os.read(receive, 1 << 16).decode() if ready else '"hangs"'
    os.close(receive)
    os.waitpid(child, 0)
    return json.loads(answer)


def forks(rank: int, world: int) -> tuple[bool, Any, Any, Any]:
    """A child reads a parameter in flight, and another one trains by itself."""
    warnings.simplefilter("ignore")  # Python warns of forks with threads
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.attach(model, optimizer, exchange=SLOW, tune=False, sentinel=0)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model[0].weight
    pending = wait_on_touch.is_marked(weight)

    def train() -> list[float]:
        before = weight.detach().clone()
        model(x).square().sum().backward()
        optimizer.step()
        return [float((weight.detach() - (before - 0.1 * weight.grad)).abs().max())]

    read = _in_child(lambda: weight.flatten().tolist())
    trained = _in_child(train)
    sync.wait()
    values = weight.flatten().tolist()
    sync.close()
    return pending, read, values, trained


def test_a_forked_child_sees_finished_values_and_a_plain_model() -> None:
    for pending, read, values, trained in run_ranks(forks, 2):
        assert pending
        assert read == values
        assert trained[0] < 1e-6, "a step of its own"


class Never:
    """The ticket of something that cannot be waited for here, such as a gradient in the middle of a backward pass."""

    marked: list[Tensor] | None = None

    def wait(self) -> None:
        raise RuntimeError("not now")

    def done(self) -> bool:
        return False


def forks_in_the_middle(rank: int, world: int) -> Any:
    warnings.simplefilter("ignore")
    tensor = torch.ones(2)
    wait_on_touch.mark(tensor, Never())
    answer = _in_child(lambda: tensor.tolist())
    wait_on_touch.release(tensor)
    return answer


def test_a_forked_child_gets_an_error_for_what_cannot_arrive() -> None:
    (answer,) = run_ranks(forks_in_the_middle, 1)
    assert answer.startswith("UsageError: this process was forked in the middle of a backward pass")


def swaps(rank: int, world: int) -> tuple[list[bool], list[float]]:
    """Parameters whose content is swapped by `load_state_dict` and `to`, right after a step."""
    models = [tiny(), tiny()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    sync = syncline.attach(models[0], optimizers[0], exchange=SLOW, tune=False, sentinel=0)
    plain = Plain(models[1], optimizers[1])
    pending, differences = [], []
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step * world + rank))
            models[0](x.to(models[0][0].weight.dtype)).square().sum().backward()
            plain.backward(models[1](x.to(models[1][0].weight.dtype)).square().sum())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            pending.append(wait_on_touch.is_marked(models[0][0].weight))
            for model in models:
                if step == 1:
                    model.load_state_dict({name: p * 0.5 for name, p in model.state_dict().items()})
                elif step == 3:
                    model.to(torch.float32, memory_format=torch.contiguous_format)
                    model._apply(lambda t: t * 2)
        differences = [
            float((a.detach() - b.detach()).abs().max()) for a, b in zip(*(m.parameters() for m in models), strict=True)
        ]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    sync.close()
    return pending, differences


def test_swapped_parameters_go_on_training_as_in_the_plain_loop() -> None:
    for pending, differences in run_ranks(swaps, 2):
        assert all(pending)
        assert differences == [0.0, 0.0]
