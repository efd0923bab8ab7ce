"""Exchanges of a loop that is not ours: DDP's buckets, and the collectives that Python calls (comm hooks, own loops).

DDP's reducer is given a process group that notes what passes through to the real one, so its sums stay its own, to the
bit, and afterwards it gets the real one back: a comm hook could not be taken away again. A user's comm hook and code
that averages by itself call functions of `torch.distributed`, which are replaced while a recording goes on.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncline._compat import reducer_group, replace_function
from syncline.trace.record.loop_hooks import Watch

# The function, our name of it, and which argument this rank contributes.
_COLLECTIVES = (
    ("all_reduce", "all-reduce", 0, "tensor"),
    ("all_reduce_coalesced", "all-reduce", 0, "tensors"),
    ("reduce", "reduce", 0, "tensor"),
    ("broadcast", "broadcast", 0, "tensor"),
    ("all_gather", "all-gather", 1, "tensor"),
    ("all_gather_into_tensor", "all-gather", 1, "input_tensor"),
    ("reduce_scatter_tensor", "reduce-scatter", 1, "input"),
    ("all_to_all_single", "all-to-all", 1, "input"),
    ("barrier", "barrier", -1, ""),
)
_NAME = 8  # characters of a group's name, which may be a long hash
_USED = "used parameters"
"""A bit each, where DDP looks for those that were not."""
_FORWARDED = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


def see_collectives(watch: Watch) -> None:
    """Record the collectives that Python calls, but for our engine's, which has spans of its own."""
    for name, ours, place, keyword in _COLLECTIVES:
        if hasattr(dist, name):
            group_at = list(inspect.signature(getattr(dist, name)).parameters).index("group")
            watch.until_closed(replace_function(dist, name, _recorded(watch, ours, place, keyword, group_at)))


def see_buckets(watch: Watch, model: nn.Module) -> None:
    """Record the buckets of every DistributedDataParallel in a model."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            watch.ddp = True
            watch.own_hook = watch.own_hook or bool(getattr(module, "_comm_hooks", True))
            watch.until_closed(_see_ddp(watch, module))


def _see_ddp(watch: Watch, module: Any) -> Callable[[], None]:
    group = module.process_group
    between = noting_group(watch, group)
    reducer_group(module, between)
    known, kept = weakref.ref(module), [between]  # the reducer alone does not keep its Python side

    def restore() -> None:
        again = known()
        if again is not None:
            reducer_group(again, group)
        kept.clear()

    return restore


def noting_group(watch: Watch, group: dist.ProcessGroup) -> Any:
    """A group that passes all on to another and notes when an all-reduce began and ended."""
    place = _place(group)

    class Between(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
            self.inner: Any = group

        def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
            options = dist.AllreduceOptions() if options is None else options
            recorder = watch.recorder
            if not recorder.enabled:
                return self.inner.allreduce(tensors, options)
            tensor = tensors[0]
            unit = f"{_USED}{place}"
            is_bucket = tensor.is_floating_point() or tensor.is_complex()
            if is_bucket:
                unit = _numbered(watch.buckets, "bucket", place)
            start = recorder.mark("exchange")
            if is_bucket:
                watch.computed = start  # the last bucket goes when the last gradient is there
            work = self.inner.allreduce(tensors, options)
            _when_done(watch, work, start, "all-reduce", unit, tensor.nbytes, device=tensor.device, queue=place)
            return work

        def getBackendName(self) -> str:
            return str(self.inner.name())

    def forward(name: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            return getattr(self.inner, name)(*args)

        return call

    for name in _FORWARDED:
        setattr(Between, name, forward(name))
    return Between()


def _place(group: Any) -> str:
    """What units of a group have behind their number: nothing where it is the world's.

    All ranks have the same name of a group, and those that are not in it have their own collectives meanwhile.
    """
    name = str(getattr(group, "group_name", ""))
    return "" if group is None or group is dist.group.WORLD or not name else f" of group {name[:_NAME]}"


def _numbered(counted: dict[str, int], kind: str, place: str) -> str:
    number = counted.get(place, 0)
    counted[place] = number + 1
    return f"{kind} {number}{place}"


def _recorded(watch: Watch, name: str, place: int, keyword: str, group_at: int) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not watch.recorder.enabled or _is_ours(sys._getframe(2)):
            return original(*args, **kwargs)
        group = args[group_at] if group_at < len(args) else kwargs.get("group")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return original(*args, **kwargs)
        recorder = watch.recorder
        given = args[place] if 0 <= place < len(args) else kwargs.get(keyword)
        queue = _place(group)
        unit = _numbered(watch.collectives, "collective", queue)
        size = _bytes(given)
        watch.interrupt()
        step, start = recorder.step, recorder.mark("exchange")
        try:
            result = original(*args, **kwargs)
        finally:
            watch.resume()
        if isinstance(result, dist.Work):
            _when_done(watch, result, start, name, unit, size, device=_device(given), queue=queue)
        else:
            recorder.add("exchange", name, start, recorder.mark("exchange"), unit=unit, bytes=size, step=step)
            watch.counts["exchange"] += 1
        return result

    return call


def _is_ours(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("syncline.")


def _when_done(
    watch: Watch, work: Any, start: Any, name: str, unit: str, size: int, *, device: torch.device, queue: str
) -> None:
    """File the span when the collective is done: on CUDA, where its end is known to be, at once."""
    recorder = watch.recorder
    step = recorder.step
    if start is None:
        return  # a CUDA graph is captured

    def done(_: Any) -> None:
        recorder.ended("exchange", name, start, unit=unit, bytes=size, step=step)
        watch.landed += 1

    try:
        future = work.get_future()
        end = recorder.mark_behind(future, device, queue)
        if end is None:
            future.then(done)
        else:
            recorder.add("exchange", name, start, end, unit=unit, bytes=size, step=step)
            watch.landed += 1
    except Exception as error:  # not all backends' works have one
        text = f"the end of a collective cannot be seen ({type(error).__name__}): it has no span"
        if text not in watch.notes:
            watch.notes.append(text)
        return
    watch.counts["exchange"] += 1
    watch.launched += 1


def _device(given: Any) -> torch.device:
    tensor = given if isinstance(given, Tensor) else given[0] if isinstance(given, list | tuple) and given else None
    return tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")


def _bytes(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.nbytes
    return sum(item.nbytes for item in given if isinstance(item, Tensor)) if isinstance(given, list | tuple) else 0
