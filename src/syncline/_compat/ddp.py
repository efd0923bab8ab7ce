"""Torch internals of DistributedDataParallel: its C++ reducer, hooks and buffers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]


def reducer_group(model: Any, group: dist.ProcessGroup) -> None:
    """Make the reducer of torch's DistributedDataParallel use `group` (of the same ranks) for its buckets."""
    model.reducer._update_process_group(group)


def make_reducer(
    parameters: Sequence[Tensor], buckets: Sequence[Sequence[int]], group: dist.ProcessGroup, *, as_views: bool
) -> Any:
    """torch's C++ reducer, as DistributedDataParallel makes it: hooks of these parameters send buckets in order.

    `as_views`: gradients are views of the buckets. It must be deleted before its group.
    """
    sizes = [sum(parameters[i].nbytes for i in bucket) for bucket in buckets]
    indices = [list(bucket) for bucket in buckets]
    return dist.Reducer(list(parameters), indices, sizes, group, gradient_as_bucket_view=as_views)  # type: ignore[attr-defined]


def set_reducer_hook(reducer: Any, hook: Callable[[Any, GradBucket], "torch.futures.Future[Any]"]) -> None:
    """Let `hook` carry the buckets; once per reducer."""
    dist._register_comm_hook(reducer, None, hook)  # type: ignore[attr-defined]


def mark_ready(reducer: Any, index: int) -> None:
    """Tell the reducer that a parameter's gradient is complete, if it does not know; only from a hook of a pass."""
    try:
        reducer._autograd_hook(index)
    except RuntimeError as error:
        if "ready only once" not in str(error):
            raise


def disarm_reducer(reducer: Any) -> None:
    """Make the reducer ignore gradients until it is prepared for the next pass."""
    reducer._reset_state()


def check_finished(reducer: Any) -> None:
    """Raise unless the reducer has averaged all gradients of the last pass."""
    reducer._check_reducer_finalized()


def remove_reducer(reducer: Any) -> None:
    """Remove the reducer's hooks from its parameters."""
    reducer._remove_autograd_hooks()


def around_buffers(model: Any, around: Callable[..., Any]) -> None:
    """Put `around` in place of the broadcast of the buffers of one DistributedDataParallel, for its whole life."""
    original = model._distributed_broadcast_coalesced
    model._distributed_broadcast_coalesced = functools.partial(around, original)


def has_comm_hook(model: Any) -> bool:
    """Whether a comm hook is registered with torch's DistributedDataParallel; True where that is not known."""
    return bool(getattr(model, "_comm_hooks", True))


def ddp_ignored(module: Any) -> bool:
    """Whether the module has a list of parameters that torch's DDP is to ignore."""
    return bool(getattr(module, "_ddp_params_and_buffers_to_ignore", None))
