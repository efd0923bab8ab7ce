"""Pickles, copies and TorchScript of an attached model are plain: they have none of the engine's hooks."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from syncline._compat.compiled import script_compiler
from syncline._compat.modules import forward_pre_hooks
from syncline._compat.replace_function import replace_function
from syncline.engine.inflight import wait_on_touch

_hooks: "weakref.WeakSet[Any]" = weakref.WeakSet()


class StayingHook:
    """A forward pre-hook of a module that does not go into copies of it."""

    def __init__(self) -> None:
        _hooks.add(self)

    def __reduce__(self) -> Any:
        # For modules with their own way to pickle attributes: a hook that returns its arguments, without this package.
        return getattr, ({}, "get")


def keep_copies_plain() -> Callable[[], None]:
    """Leave these hooks out of pickles, copies and TorchScript; returns a function that ends this."""
    undo = [
        replace_function(nn.Module, "__getstate__", _getstate),
        replace_function(script_compiler(), "create_script_module", _create_script_module),
    ]

    def end() -> None:
        for each in undo:
            each()

    return end


def _getstate(original: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    state = original(module)
    hooks = state.get("_forward_pre_hooks") if isinstance(state, dict) else None
    if hooks and any(hook in _hooks for hook in hooks.values()):
        kept = OrderedDict((key, hook) for key, hook in hooks.items() if hook not in _hooks)
        return {**state, "_forward_pre_hooks": kept}
    return state


def _create_script_module(create: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.script` and `torch.jit.trace` make a module of TorchScript: nothing may be in flight then."""
    for tensor in (*module.parameters(), *module.buffers()):
        wait_on_touch.touch(tensor)
        if wait_on_touch.is_marked(tensor):  # for other streams
            torch.cuda.synchronize(tensor.device)
            wait_on_touch.touch(tensor)
    with ExitStack() as restore:
        for each in module.modules():
            hooks = forward_pre_hooks(each)
            before = list(hooks.items())
            ours = [key for key, hook in before if hook in _hooks]
            if ours:
                restore.callback(hooks.update, before)  # in the same order
                restore.callback(hooks.clear)
                for key in ours:
                    del hooks[key]
        return create(module, *args, **kwargs)
