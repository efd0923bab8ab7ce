"""Hooks on the modules that a training loop calls; their submodules are not hooked and cost nothing."""

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from syncline._compat.compiled import replace_compiled_call
from syncline._compat.modules import on_every_forward
from syncline.trace.record.loop_hooks import LoopHooks


def hook_module(hooks: LoopHooks, model: nn.Module) -> None:
    """Record the forward passes of a module."""

    def around_compiled(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = hooks.enter_forward()
        result = compiled(*args, **kwargs)
        hooks.leave_forward(start)
        return result

    # `model.compile()` would compile forward hooks together with the model, so its entry is replaced instead.
    restore = replace_compiled_call(model, around_compiled)
    if restore is not None:
        hooks.cleanup.callback(restore)
        return
    before, after = _forward_hooks(hooks, lambda _: True)
    # First: the all-gather in the hook of a sharded module (FSDP) is a part of the forward pass.
    hooks.cleanup.callback(model.register_forward_pre_hook(before, prepend=True).remove)
    hooks.cleanup.callback(model.register_forward_hook(after, always_call=True).remove)


def find_models(hooks: LoopHooks, *, seen: Callable[[nn.Module], None], use: Callable[[nn.Module], None]) -> None:
    """Record with hooks on all modules until a step ends, then `use` each module that the loop itself called.

    `seen` is called before the first forward pass of each, when it is too late for hooks on the module.
    """
    if hooks.on_step_end is not None:
        return
    found: list[weakref.ref[nn.Module]] = []

    def called(module: nn.Module) -> None:
        if all(known() is not module for known in found):
            found.append(weakref.ref(module))
            seen(module)

    remove = on_every_forward(*_forward_hooks(hooks, _has_parameters, called))

    def step_ended() -> None:
        remove()
        for known in found:
            module = known()
            if module is not None:
                use(module)

    hooks.cleanup.callback(remove)
    hooks.on_step_end = step_ended


def _forward_hooks(
    hooks: LoopHooks, counts: Callable[[nn.Module], bool], called: Callable[[nn.Module], None] = lambda _: None
) -> "tuple[_Hook, _Hook]":
    """Hooks that record the outermost call in a thread if its module `counts`, and report it to `called`."""
    calls = hooks.forward_calls

    def before(module: nn.Module, args: Any) -> None:
        step = hooks.recorder.step
        if calls.depth and calls.step != step:
            calls.depth = 0  # left over from an interrupted forward pass
        if not calls.depth and counts(module):
            called(module)
            calls.step, calls.start = step, hooks.enter_forward()
        elif not calls.depth:
            return
        calls.depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not calls.depth:
            return
        calls.depth -= 1
        # If the forward pass failed, torch calls this without an output while the exception is handled.
        if not calls.depth and not (output is None and sys.exc_info()[1] is not None):
            hooks.leave_forward(calls.start)

    return _Hook(before), _Hook(after)


class _Hook:
    """A hook on a module. Copying or pickling the module turns it into a hook that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> Any:
        # From the standard library: Syncline may not be installed where the file is loaded.
        return getattr, (nullcontext(), "__exit__")


def _has_parameters(module: nn.Module) -> bool:
    """Separates models from losses."""
    return next(module.parameters(), None) is not None
