"""The equality table: a row is a training loop registered by a decorator; and the plain loop that most rows vary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from equality_models import BOTH, mlp
from equality_ways import Run
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A row of the table. `core`: also with 1, 3 and 4 ranks. `exact`: to the bit with 1 and 2 ranks.

    `tolerance`: rtol and atol where it is to rounding, if not those of the parameters' precision.
    """

    function: Callable[[Run], None]
    core: bool
    optimizers: tuple[str, ...]
    exact: bool
    tolerance: tuple[float, float] | None


CASES: dict[str, Case] = {}


def case(
    *,
    core: bool = False,
    optimizers: tuple[str, ...] = BOTH,
    exact: bool = True,
    tolerance: tuple[float, float] | None = None,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the table, under its name."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        CASES[function.__name__] = Case(function, core, optimizers, exact, tolerance)
        return function

    return add


def nothing(_step: int) -> None:
    """What a loop does where a case has nothing to do."""


def train(
    run: Run,
    model: nn.Module,
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
