"""The table of loops: a row is a training loop registered by a decorator; and the plain loop that most rows vary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loops.models import mlp
from loops.ways import START, WAYS, Run


@dataclass(frozen=True)
class Row:
    """A training loop, and how it is compared."""

    name: str
    subject: str
    """The file it is in."""
    function: Callable[[Run], None]
    optimizer: str
    """The optimizer that `run.optimizer` builds."""
    core: bool
    """Also with 1, 3 and 4 ranks."""
    ddp: bool
    """Its dense reference is torch's DDP; else DDP cannot run this loop, and it is the loop with its own all-reduce."""
    rounds: tuple[str, ...]
    """Ways that agree to rounding only; all others are compared bit for bit with 1 and 2 ranks."""
    tolerance: tuple[float, float]
    """rtol and atol where it is to rounding."""
    steps: int
    ways: tuple[str, ...]
    tuned: bool
    """Tuning is on in the way `dense`."""
    cuda: bool
    """Also on a GPU."""
    together: int
    """It needs at least this many ranks."""


ROWS: dict[str, Row] = {}


def row(
    *,
    optimizer: str = "sgd",
    core: bool = False,
    ddp: bool = True,
    rounds: tuple[str, ...] = (),
    tolerance: tuple[float, float] = (1e-4, 1e-6),
    steps: int = 5,
    ways: tuple[str, ...] = WAYS,
    tuned: bool = False,
    cuda: bool = True,
    together: int = 1,
    name: str | None = None,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the table, under its name."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        known, subject = name or function.__name__, function.__module__.rpartition(".")[2]
        assert known not in ROWS, f"two rows have the name {known}"
        all_ways = (*ways, START) if {"dense", "reducer"} <= {*ways} else ways
        rounded = (*rounds, START) if {"dense", "reducer"} & {*rounds} else rounds
        ROWS[known] = Row(
            known, subject, function, optimizer, core, ddp, rounded, tolerance, steps, all_ways, tuned, cuda, together
        )
        return function

    return add


def nothing(_step: int) -> None:
    """What a loop does where a row has nothing to do."""


def train(
    run: Run,
    optimizer: torch.optim.Optimizer,
    net: Callable[..., Tensor],
    *,
    between: Callable[[int], Any] = nothing,
    after: Callable[[int], Any] = nothing,
    **more: Any,
) -> None:
    """The plain loop; `between` runs after backward and before step, `after` right after step."""
    for step in range(run.steps):
        run.loss(net, step, **more).backward()
        between(step)
        optimizer.step()
        after(step)
        optimizer.zero_grad()


def plain(run: Run, make: Callable[[], nn.Module] = mlp) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Model, optimizer and the callable that trains it."""
    model = make()
    optimizer = run.optimizer(model.parameters())
    return model, optimizer, run.attach(model, optimizer)
