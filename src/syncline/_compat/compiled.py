"""Torch internals of compiled code: torch.compile and TorchScript."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def let_script_know(original: Any, function: Any) -> Callable[[], None]:
    """TorchScript code that calls `function` gets the operator of `original`, until the returned function is called.

    TorchScript knows functions by id, and another function may get the id of one that is gone.
    """
    from torch.jit import _builtins

    operator = _builtins._find_builtin(original)
    if operator is not None:
        _builtins._register_builtin(function, operator)

    def forget() -> None:
        if operator is not None:
            _builtins._get_builtin_table().pop(id(function), None)

    return forget


def script_methods() -> list[tuple[Any, str]]:
    """The calls of methods of TorchScript modules."""
    return [(torch._C.ScriptMethod, "__call__")]


def note_functions_for_compile() -> None:
    """Let torch.compile note torch's functions, which it knows by their objects, before some are replaced."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    trace_rules.get_torch_obj_rule_map()
    with suppress(AttributeError):
        TorchInGraphFunctionVariable._get_handlers()


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model or a part of it goes through torch.compile."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def replace_compiled_call(model: Any, around: Callable[..., Any]) -> Callable[[], None] | None:
    """Put `around(compiled, *args, **kwargs)` in place of the call that `model.compile()` made.

    Returns the function that restores it, or None where the model is not compiled in place.
    """
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is None:
        return None
    replaced = model._compiled_call_impl = functools.partial(around, compiled)
    known = weakref.ref(model)

    def restore() -> None:
        model = known()
        if model is not None and model._compiled_call_impl is replaced:
            model._compiled_call_impl = compiled

    return restore


def caller_module(depth: int) -> str:
    """The name of the module whose code called this function's caller, `depth` calls up from there."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def on_compile_start(callback: Callable[..., None]) -> Callable[[], None]:
    """Call `callback` whenever torch.compile starts to trace a frame; returns a function that removes it.

    Called again with the same one, it has an effect only if somebody has removed the callback.
    """
    from torch._dynamo.callback import callback_handler

    if callback not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(callback)

    def remove() -> None:
        if callback in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(callback)

    return remove


def script_compiler() -> Any:
    """The module in which `torch.jit.script` and `torch.jit.trace` look up `create_script_module`."""
    from torch.jit import _recursive

    return _recursive


@contextmanager
def not_compiling() -> Iterator[None]:
    """Clear the process-wide flag that torch.compile is tracing: optimizers compute differently under it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_optimized_module(module: Any) -> bool:
    """Whether this is the result of `torch.compile(module)`."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
