"""Private, untyped or version-dependent torch API, all of it, so that a torch release is one file to read."""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore as FileStore  # type: ignore[attr-defined]
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]
from torch.distributed import rendezvous as rendezvous  # type: ignore[attr-defined]

NoSubclasses: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses are plain tensors; it holds for the thread that enters it."""


def storage_users(tensor: Tensor) -> int:
    """How many tensors and storage objects share a tensor's memory, the tensor itself included."""
    with NoSubclasses():
        storage = tensor.untyped_storage()
    # One of the users is the storage object made here.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that runs now has ended; only from a hook in that pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_nested_backward() -> bool:
    """Whether this thread is inside a backward pass that a custom function's backward started (checkpointing)."""
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def default_store() -> Store:
    """The store that the default process group met at."""
    return dist.distributed_c10d._get_default_store()


def world_group() -> dist.ProcessGroup:
    """The default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that a collective of this group may take."""
    made = group or world_group()
    options = made._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")).options
    return float(options._timeout.total_seconds())


def new_group(
    ranks: Sequence[int], *, timeout: Any, backend: str | None = None, slim: bool = False
) -> dist.ProcessGroup:  # fmt: skip
    """A group of these ranks alone, made without the others. `slim`: with NCCL, on as little of a GPU as can be."""
    whole = len(ranks) == dist.get_world_size()
    options = None
    if slim:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.max_ctas = 1
    return dist.new_group(  # type: ignore[no-any-return]
        list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=not whole
    )


def cut_gloo(group: dist.ProcessGroup) -> None:
    """Close a Gloo group's connections: all that waits in it, here and on other ranks, ends with an error now.

    Gloo's `abort` wakes nobody. A receive that times out closes all connections of the group; one from a rank whose
    connection is closed already does not, so all are tried.
    """
    if dist.get_backend(group) != "gloo":
        return
    for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
        with suppress(RuntimeError):
            late: Any = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=(1 << 31) - 1)
            late.wait(timedelta(milliseconds=1))


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The optimizer class's own `step`, without the hooks and profiler that torch wraps around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def global_step_hooks() -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that torch calls before and after every optimizer's step."""
    from torch.optim import optimizer

    return list(optimizer._global_optimizer_pre_hooks.values()), list(optimizer._global_optimizer_post_hooks.values())


def on_every_step(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Have these called around every optimizer's step; returns what takes them away again."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def raw_stream(index: int) -> int:
    """The handle of a CUDA device's current stream; `torch.cuda.current_stream` makes an object each time."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def on_every_backward(around: Callable[..., Any]) -> Callable[[], None]:
    """Have `around(backward, *args, **kwargs)` called for every backward pass; returns what takes it away again.

    `Tensor.backward` looks `torch.autograd.backward` up when it is called, so one place is enough.
    """
    return replace_function(torch.autograd, "backward", around)


def replace_function(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around(original, *args, **kwargs)` in a module function's place; returns what puts the original back."""
    original = getattr(owner, name)
    lost = False

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if lost else around(original, *args, **kwargs)

    def restore() -> None:
        nonlocal lost
        lost = True
        # Somebody else's replacement of ours stays, and comes through.
        if getattr(owner, name) is replaced:
            setattr(owner, name, original)

    setattr(owner, name, replaced)
    return restore


def reducer_group(model: Any, group: dist.ProcessGroup) -> None:
    """Have the reducer of torch's DistributedDataParallel exchange its buckets over `group`, of the same ranks."""
    model.reducer._update_process_group(group)


def has_comm_hook(model: Any) -> bool:
    """Whether a comm hook is registered with torch's DistributedDataParallel; True where that is not known."""
    return bool(getattr(model, "_comm_hooks", True))


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


def on_every_forward(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Have these called around the forward of every module; returns what takes them away again."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def on_compile_start(callback: Callable[..., None]) -> Callable[[], None]:
    """Have `callback` called whenever torch.compile starts to trace a frame; returns what takes it away again."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(callback)
    return lambda: callback_handler.remove_start_callback(callback)


@contextmanager
def not_compiling() -> Iterator[None]:
    """Take down the sign that torch.compile is at work: it is the whole process's, and optimizers round by it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_optimized_module(module: Any) -> bool:
    """Whether this is what `torch.compile(module)` returns."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")


__all__ = ["FileStore", "GradBucket", "NoSubclasses", "PrefixStore", "Store", "TCPStore", "rendezvous"]
