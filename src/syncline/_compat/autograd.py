"""Torch internals of autograd: hooks of parameters, backward passes, accumulation."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncline._compat.replace_function import replace_function


def run_last(parameter: Tensor, handle: Any) -> None:
    """Make a post-accumulate hook the last one of its parameter; only before the gradient is accumulated."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)


def has_other_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has several post-accumulate hooks."""
    return len(parameter._post_accumulate_grad_hooks) > 1


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that runs now has ended; only from a hook of that pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs a backward pass (is inside one of its hooks)."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_nested_backward() -> bool:
    """Whether this thread is inside a backward pass that a custom function's backward started (checkpointing)."""
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def on_every_backward(around: Callable[..., Any]) -> Callable[[], None]:
    """Call `around(backward, *args, **kwargs)` for every backward pass; returns a function that removes it.

    `Tensor.backward` looks `torch.autograd.backward` up when it is called, so one place is enough.
    """
    return replace_function(torch.autograd, "backward", around)


def compiled_autograd() -> bool:
    """Whether backward passes are compiled now; hooks of C++ code do not run then."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Run a backward pass that adds `gradient` to this parameter's gradient, unseen by `around_gradients`."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((parameter,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def around_gradients(around: Callable[..., Any]) -> Callable[[], None]:
    """Call `around(run, create_graph)` for every pass that adds to `.grad`; returns a function that removes it.

    `around` calls `run()`. `Tensor.backward` and `torch.autograd.backward` come through here, even if kept by name.
    """

    def replaced(original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad", False):
            return original(roots, *args, **kwargs)
        return around(lambda: original(roots, *args, **kwargs), bool(args[2]))

    return replace_function(torch.autograd, "_engine_run_backward", replaced)


def accumulator_is_held(parameter: Tensor) -> bool:
    """Whether somebody holds the autograd node that accumulates this gradient: a live graph, or DDP's reducer.

    Without a holder, every access makes a new node, without the metadata of the last one.
    """

    def node() -> Any:
        with torch.enable_grad():
            return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    node().metadata["syncline"] = True
    return node().metadata.pop("syncline", None) is not None
