"""Compiled code reads parameters without asking Python: it is entered only when nothing is in flight.

Where the entry is known (a module that `torch.compile` returned, a module compiled in place) it waits there, so that
`optimizer.step()` still returns at once. Where the model is compiled from outside (`torch.compile(model)` after attach,
a compiled function that calls it) the traced call leaves a mark, and from then on `step()` itself waits.
"""

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from syncline._compat import is_optimized_module, not_compiling, on_compile_start

if TYPE_CHECKING:
    from syncline.engine.sync import Sync


class Mark:
    """Whether the model was called inside compiled code; traced code sets it."""

    def __init__(self) -> None:
        self.inside = False


class Compiled:
    """Keeps compiled code away from parameters in flight."""

    def __init__(self, sync: "Sync") -> None:
        self._sync, self.mark = sync, Mark()
        self._entries: dict[int, Any] = {}
        self._undo: list[Any] = []
        mark = self.mark

        def enter(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                mark.inside = True

        if not is_optimized_module(sync.model):
            self._undo.append(sync.model.register_forward_pre_hook(enter).remove)
        self.scan()
        self._undo.append(on_compile_start(self._compiling))

    def scan(self) -> None:
        """Find the modules that are compiled, and let their callers wait."""
        self._scripted = any(isinstance(m, torch.jit.ScriptModule) for m in self._sync.model.modules())
        for module in self._sync.model.modules():
            if id(module) in self._entries:
                continue
            if is_optimized_module(module):
                self._entries[id(module)] = module
                self._undo.append(module.register_forward_pre_hook(lambda *_: self._sync.wait()).remove)
            elif getattr(module, "_compiled_call_impl", None) is not None:
                self._entries[id(module)] = module
                self._wrap(module)

    @property
    def entered(self) -> bool:
        """Whether compiled code reads the parameters anywhere."""
        return bool(self._entries) or self.outside

    @property
    def outside(self) -> bool:
        """Whether `step()` must wait, since nobody can tell when compiled code will read the parameters."""
        return self.mark.inside or self._scripted

    def close(self) -> None:
        """Take the hooks away."""
        for undo in self._undo:
            undo()

    def _wrap(self, module: Any) -> None:
        inner = module._compiled_call_impl

        @wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._sync.wait()
            return inner(*args, **kwargs)

        module._compiled_call_impl = call

        def undo() -> None:
            module._compiled_call_impl = inner

        self._undo.append(undo)

    def _compiling(self, *_: Any) -> None:
        """torch is about to trace a frame: it must not see a tensor that waits."""
        marked = self._sync._outstanding or self._sync._profile is not None
        if marked and not self._sync._open:
            self.scan()
            with not_compiling():  # updates in another thread must not take themselves for traced ones
                self._sync.wait()
            self.mark.inside = True
