"""Compiled code reads parameters without `__torch_function__`: it is entered only when nothing is in flight.

If the entry is known (a module that `torch.compile` returned, a module compiled in place), callers wait there, and
`optimizer.step()` still returns at once. If the model is compiled from outside (`torch.compile(model)` after attach, a
compiled function that calls it), the traced call leaves a mark, and from then on `step()` itself waits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from syncline._compat.compiled import is_optimized_module, not_compiling, on_compile_start, replace_compiled_call
from syncline.engine.inflight.plain_copies import StayingHook
from syncline.engine.weak_callback import weak_callback


class TraceMark(StayingHook):
    """A forward pre-hook of the model that notes whether it was called inside compiled code; traced code sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            self.inside = True


class CompiledCode:
    """Makes compiled code wait for parameters in flight.

    `wait` waits for all that is in flight; `marked` tells whether tensors are marked, with no backward pass running.
    """

    def __init__(self, model: nn.Module, *, wait: Callable[[], None], marked: Callable[[], bool]) -> None:
        self._model, self._wait, self._marked = model, wait, marked
        self._entries: dict[int, nn.Module] = {}
        self._undo: list[Callable[[], None]] = []
        self._mark = TraceMark()
        # A TorchScript module takes no hooks, and is not traced.
        if not is_optimized_module(model) and not isinstance(model, torch.jit.ScriptModule):
            self._undo.append(model.register_forward_pre_hook(self._mark).remove)
        self._find_entries()
        self._at_compile_start = weak_callback(self._before_tracing)
        self.stop_watching = on_compile_start(self._at_compile_start)
        """Removes the callback; it does not refer to this object."""

    def after_step(self) -> None:
        """Watch for compilation again: `torch.export` and `torch._dynamo.reset` remove all callbacks."""
        on_compile_start(self._at_compile_start)

    @property
    def reads_parameters(self) -> bool:
        """Whether compiled code reads the parameters anywhere."""
        return bool(self._entries) or self.step_must_wait

    @property
    def step_must_wait(self) -> bool:
        """Whether `step()` must wait, because compiled code may read the parameters at any time."""
        return self._mark.inside

    def close(self) -> None:
        """Remove the hooks."""
        self.stop_watching()
        for undo in self._undo:
            undo()

    def _find_entries(self) -> None:
        """Make callers of compiled modules wait."""
        for module in self._model.modules():
            if id(module) in self._entries:
                continue
            if is_optimized_module(module):
                self._entries[id(module)] = module
                self._undo.append(module.register_forward_pre_hook(lambda *_: self._wait()).remove)
            elif (restore := replace_compiled_call(module, self._wait_then_call)) is not None:
                self._entries[id(module)] = module
                self._undo.append(restore)

    def _wait_then_call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return compiled(*args, **kwargs)

    def _before_tracing(self, *_: Any) -> None:
        """torch.compile is about to trace a frame: it must not see a marked tensor."""
        if self._marked():
            self._find_entries()
            with not_compiling():  # else updates in another thread would run as if they were traced
                self._wait()
            self._mark.inside = True
