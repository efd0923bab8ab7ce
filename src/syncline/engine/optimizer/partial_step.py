"""Step an optimizer on some of its parameters: the same class, settings and state, one part at a time.

Each part is stepped by a temporary optimizer object whose groups hold aliases of the parameters. Its settings are those
at the time of the user's `step()`: a scheduler may change them while a part is still in flight.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline._compat import unhooked_step, wrapped_by_scheduler
from syncline.engine.launch.units import ParameterUpdate
from syncline.engine.optimizer.waiting_state import WaitingState

Settings = list[dict[str, Any]]


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
        groups.append({**values, "params": [m.alias for m in mine]})
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
