"""Hooks on the modules that a loop calls, and on those alone: their parts cost nothing."""

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from syncline._compat import on_every_forward
from syncline.trace.record.loop_hooks import Watch


def see(watch: Watch, model: nn.Module) -> None:
    """Record the forward passes of a module, as it is called."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        watch.until_closed(_around_compiled(watch, model))
        return
    calls = _Calls()

    def before(module: nn.Module, args: Any) -> None:
        step = watch.recorder.step
        if calls.depth and calls.step != step:
            calls.depth = 0  # an interrupt left it
        if not calls.depth:
            calls.step, calls.start = step, watch.enter_forward()
        calls.depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:
        calls.depth = max(0, calls.depth - 1)
        # Torch calls this without an output, and from its handler, where the forward has failed.
        if not calls.depth and not (output is None and sys.exc_info()[1] is not None):
            watch.leave_forward(calls.start)

    entered = model.register_forward_pre_hook(_Hook(before))
    left = model.register_forward_hook(_Hook(after), always_call=True)
    for handle in (entered, left):
        watch.until_closed(handle.remove)


def search(watch: Watch, use: Callable[[nn.Module], None]) -> None:
    """Find out in the step that begins which modules are called from outside others; `use` each of them after it."""
    found: list[weakref.ref[nn.Module]] = []
    depth, start = 0, None

    def before(module: nn.Module, args: Any) -> None:
        nonlocal depth, start
        if not depth and _trains(module):
            start = watch.enter_forward()
        depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth = max(0, depth - 1)
        if not depth and _trains(module):
            watch.leave_forward(start)
            if all(known() is not module for known in found):
                found.append(weakref.ref(module))

    remove = on_every_forward(_Hook(before), _Hook(after))

    def done() -> None:
        remove()
        for known in found:
            module = known()
            if module is not None:
                use(module)

    watch.until_closed(remove)
    watch.on_step = done


class _Calls(threading.local):
    """The calls of a module that one thread is in: one that calls itself is one forward."""

    depth = step = 0
    start: Any = None


class _Hook:
    """A hook on a module; in a copy of the module, or a file of it, there is one that does nothing instead."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> Any:
        # Of the standard library: whoever loads the file may not have ours.
        return getattr, (nullcontext(), "__exit__")


def _trains(module: nn.Module) -> bool:
    """Whether it has parameters: a loss has none."""
    return next(module.parameters(), None) is not None


def _around_compiled(watch: Watch, model: Any) -> Callable[[], None]:
    """`model.compile()` compiles the hooks with the model: its entry is replaced instead."""
    compiled = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        start = watch.enter_forward()
        result = compiled(*args, **kwargs)
        watch.leave_forward(start)
        return result

    model._compiled_call_impl = call
    known = weakref.ref(model)

    def restore() -> None:
        again: Any = known()
        if again is not None and again._compiled_call_impl is call:
            again._compiled_call_impl = compiled

    return restore
