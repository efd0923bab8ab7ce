"""An optimizer stepped by parts: the same class, settings and state, on some of its parameters at a time.

Each part is stepped through a stand-in of the optimizer whose groups hold aliases of the parameters, with the settings
as they were when the user called `step()`: a scheduler may change them while a part is still in flight.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline._compat import unhooked_step

Settings = list[dict[str, Any]]


@dataclass(frozen=True)
class Member:
    """A parameter to be updated: its group in the optimizer, itself, an alias of its memory, and its gradient."""

    group: int
    parameter: Tensor
    alias: Tensor
    grad: Tensor


def steps_by_parts(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimizer cannot be stepped by parts; empty if it can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not one of torch's: whether it steps each parameter by itself is not known"
    own = optimizer.__dict__.get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return f"the step of this {kind.__name__} was replaced by another function"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS looks at all parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True records the step"
    return ""


def settings(optimizer: torch.optim.Optimizer) -> Settings:
    """The groups' settings as they are now, without the parameters."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def update(optimizer: torch.optim.Optimizer, at: Settings, members: Sequence[Member]) -> None:
    """Step these parameters with these settings; from any thread, one parameter in one call at a time."""
    kind = type(optimizer)
    part: Any = object.__new__(kind)
    part.__dict__.update(optimizer.__dict__)
    part.state = defaultdict(dict)
    kept: Any = optimizer.state
    groups = []
    for index, values in enumerate(at):
        mine = [m for m in members if m.group == index]
        if not mine:
            continue
        for m in mine:
            m.alias.grad = m.grad
            if dict.__contains__(kept, m.parameter):
                part.state[m.alias] = dict.__getitem__(kept, m.parameter)
        groups.append({**values, "params": [m.alias for m in mine]})
    part.param_groups = groups
    try:
        unhooked_step(kind)(part)
    finally:
        for m in members:
            m.alias.grad = None
    for m in members:
        if m.alias in part.state:
            dict.__setitem__(kept, m.parameter, part.state[m.alias])


class WaitingState(defaultdict):  # type: ignore[type-arg]
    """An optimizer's `state` that waits for updates in flight before anybody reads it."""

    def __init__(self, content: Mapping[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(dict, content)
        self._wait = wait

    def __reduce__(self) -> Any:
        self._wait()
        return defaultdict, (dict,), None, None, iter(dict.items(self))

    def __getitem__(self, key: Any) -> Any:
        self._wait()
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._wait()
        return super().__contains__(key)

    def __iter__(self) -> Any:
        self._wait()
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dict's."""
        self._wait()
        return super().get(key, default)

    def items(self) -> Any:
        """As a dict's."""
        self._wait()
        return super().items()

    def values(self) -> Any:
        """As a dict's."""
        self._wait()
        return super().values()
