"""Step an optimizer on some of its parameters: the same class, settings and state, one part at a time.

Each part is stepped by a temporary optimizer object whose groups hold aliases of the parameters. Its settings are those
at the time of the user's `step()`: a scheduler may change them while a part is still in flight.

On a CPU torch steps parameter by parameter unless it is told otherwise. Many small ones are stepped as lists here.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from syncline._compat.optimizers import unhooked_step, wrapped_by_scheduler
from syncline.engine.launch.units import ParameterUpdate
from syncline.engine.optimizer.waiting_state import WaitingState

Settings = list[dict[str, Any]]

_SAME_BITS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "Rprop")
"""Optimizers of torch that give the same bits on a CPU with `foreach=True`."""
_DTYPES = (torch.float32, torch.float64)
_SMALL = 1 << 14
"""Values of a parameter, on average, up to which lists are faster. Larger ones profit from the cache, one by one."""


def steps_as_lists(optimizer: torch.optim.Optimizer, values: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Whether parameters with these settings are to be stepped with `foreach=True`, which the user has left open."""
    kind = type(optimizer)
    if kind.__name__ not in _SAME_BITS or kind is not getattr(torch.optim, kind.__name__):
        return False
    if values.get("foreach", False) is not None or values.get("fused") or values.get("differentiable"):
        return False
    # torch does not take a tensor for the learning rate together with lists.
    if len(parameters) < 2 or any(isinstance(value, Tensor) for value in values.values()):
        return False
    # Short floats are rounded elsewhere in a list.
    plain = all(type(p) in (Tensor, nn.Parameter) and p.device.type == "cpu" and p.dtype in _DTYPES for p in parameters)
    return plain and sum(p.numel() for p in parameters) <= _SMALL * len(parameters)


@contextmanager
def stepping_as_lists(optimizer: torch.optim.Optimizer, groups: Sequence[int]) -> Iterator[None]:
    """Let a whole step use lists for these parameter groups."""
    changed = [optimizer.param_groups[index] for index in groups]
    for group in changed:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in changed:
            group["foreach"] = None


def why_whole(optimizer: torch.optim.Optimizer) -> str:
    """The reason why this optimizer can only step all parameters at once; empty if it can step by parts."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not one of torch's optimizers, so it may not step each parameter by itself"
    own = optimizer.__dict__.get("step")
    if own is not None and not wrapped_by_scheduler(own):
        return f"the step of this {kind.__name__} was replaced by another function"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS looks at all parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True records the step"
    return ""


def settings(optimizer: torch.optim.Optimizer) -> Settings:
    """The settings of all parameter groups as they are now, without the parameters."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def step_part(
    optimizer: torch.optim.Optimizer,
    state: WaitingState,
    at: Settings,
    members: Sequence[ParameterUpdate],
    arguments: tuple[Sequence[Any], dict[str, Any]] = ((), {}),
) -> None:
    """Step these parameters with these settings, arguments and the state that `optimizer` had then.

    From any thread, but only one call at a time for a parameter.
    """
    kind = type(optimizer)
    part: Any = object.__new__(kind)
    part.__dict__.update(optimizer.__dict__)
    part.state = defaultdict(state.default_factory)
    groups = []
    for index, values in enumerate(at):
        mine = [m for m in members if m.group == index]
        if not mine:
            continue
        for m in mine:
            m.alias.grad = m.grad
            entry = state.entry(m.parameter)
            if entry is not None:
                part.state[m.alias] = entry
        params = [m.alias for m in mine]
        lists = {"foreach": True} if steps_as_lists(optimizer, values, params) else {}
        groups.append({**values, **lists, "params": params})
    part.param_groups = groups
    args, kwargs = arguments
    try:
        unhooked_step(kind)(part, *args, **kwargs)
    finally:
        for m in members:
            m.alias.grad = None
    for m in members:
        if m.alias in part.state:
            state.put(m.parameter, part.state[m.alias])
