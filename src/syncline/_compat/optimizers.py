"""Torch internals of optimizers: `step` without its wrappers, hooks of steps, schedulers' marks."""

from collections.abc import Callable
from typing import Any

import torch


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The optimizer class's own `step`, without the hooks and profiler that torch wraps around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def step_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that torch calls before and after this optimizer's step, in torch's order."""
    from torch.optim import optimizer as module

    before = [*module._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()]
    return before, after


def wrapped_by_scheduler(function: Any) -> bool:
    """Whether a learning-rate scheduler has wrapped this optimizer method."""
    return hasattr(function, "_wrapped_by_lr_sched")


def pass_for_step(function: Any, original: Any) -> None:
    """Let a learning-rate scheduler accept `function` in place of `original`, which it may have wrapped."""
    if wrapped_by_scheduler(original):
        function._wrapped_by_lr_sched = True


def note_step_called(optimizer: Any) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped."""
    optimizer._opt_called = True


def on_every_step(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call these around every optimizer's step; returns a function that removes them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
