"""Recording of a loop's exchanges: DDP's buckets and buffers, and the collectives that Python code calls.

DDP's reducer gets a process group that records all-reduces and passes them on to the real group. Its arithmetic stays
bit-identical, and it gets the real group back afterwards; a comm hook could not be removed again. A user's comm hook or
own averaging calls functions of `torch.distributed`, which are replaced during a recording.

While the training thread waits for a collective it does no forward, backward or data work, whatever pass it is in. This
time is recorded as blocked: around a collective that blocks, and around `Work.wait` of one that was started earlier.
On a CPU the same holds for the time in which it packs, starts or unpacks a message: it is recorded as issuing.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncline._compat.compiled import caller_module
from syncline._compat.ddp import has_comm_hook, reducer_group
from syncline._compat.fsdp import on_fsdp_messages
from syncline._compat.groups import on_coalesced_broadcast, on_every_wait
from syncline._compat.replace_function import replace_function
from syncline.trace.record.loop_hooks import LoopHooks
from syncline.trace.record.recorder import Mark
from syncline.trace.span import group_label

# The function, our name of the collective, and the argument that this rank contributes (position, keyword).
_COLLECTIVES = (
    ("all_reduce", "all-reduce", 0, "tensor"),
    ("all_reduce_coalesced", "all-reduce", 0, "tensors"),
    ("reduce", "reduce", 0, "tensor"),
    ("broadcast", "broadcast", 0, "tensor"),
    ("all_gather", "all-gather", 1, "tensor"),
    ("all_gather_single", "all-gather", 1, "input_tensor"),
    ("all_gather_into_tensor", "all-gather", 1, "input_tensor"),
    ("gather", "gather", 0, "tensor"),
    ("scatter", "scatter", 0, "tensor"),
    ("reduce_scatter", "reduce-scatter", 1, "input_list"),
    ("reduce_scatter_single", "reduce-scatter", 1, "input"),
    ("reduce_scatter_tensor", "reduce-scatter", 1, "input"),
    ("all_to_all", "all-to-all", 1, "input_tensor_list"),
    ("all_to_all_single", "all-to-all", 1, "input"),
    ("barrier", "barrier", -1, ""),
    ("monitored_barrier", "barrier", -1, ""),
    ("all_gather_object", "all-gather", -1, ""),
    ("broadcast_object_list", "broadcast", -1, ""),
    ("gather_object", "gather", -1, ""),
    ("scatter_object_list", "scatter", -1, ""),
)
_GROUP_NAME_CHARACTERS = 8  # a group's name may be a long hash
_PASSED_ON = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


def hook_collectives(hooks: LoopHooks) -> None:
    """Record the collectives that Python code calls, except those of our engine, which adds its own spans."""
    for function, name, position, keyword in _COLLECTIVES:
        if hasattr(dist, function):
            group_at = list(inspect.signature(getattr(dist, function)).parameters).index("group")
            wrapper = _wrapper(hooks, name, position, keyword, group_at)
            hooks.cleanup.callback(replace_function(dist, function, wrapper))
    hooks.cleanup.callback(on_coalesced_broadcast(_wrapper(hooks, "broadcast", 1, "tensors", 0, unit="buffers")))
    hooks.cleanup.callback(on_every_wait(_around_wait(hooks)))
    hooks.cleanup.callback(on_fsdp_messages(_around_fsdp(hooks)))


def hook_ddp_buckets(hooks: LoopHooks, module: DistributedDataParallel) -> None:
    """Record the buckets of a DistributedDataParallel."""
    hooks.uses_ddp = True
    hooks.has_comm_hook = hooks.has_comm_hook or has_comm_hook(module)
    group = module.process_group
    recording = RecordingGroup(hooks, group)
    reducer_group(module, recording)
    # The reducer does not keep the Python object of a group alive, so the callback does.
    hooks.cleanup.callback(_restore_group, weakref.ref(module), group, recording)


def _restore_group(module: weakref.ref[nn.Module], group: Any, recording: "RecordingGroup") -> None:
    living = module()
    if living is not None:
        reducer_group(living, group)


class RecordingGroup(dist.ProcessGroup):
    """A process group that records all-reduces and passes every call on to another group."""

    def __init__(self, hooks: LoopHooks, group: Any) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._hooks, self._inner, self._group = hooks, group, _label(group)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """DDP calls this for each bucket, and for the bitmap of used parameters."""
        hooks, recorder = self._hooks, self._hooks.recorder
        options = dist.AllreduceOptions() if options is None else options
        if not recorder.enabled:
            return self._inner.allreduce(tensors, options)
        tensor = tensors[0]
        unit = _unit("used parameters", self._group)
        is_bucket = tensor.is_floating_point() or tensor.is_complex()
        if is_bucket:
            unit = _unit(f"bucket {next(hooks.bucket_numbers[self._group])}", self._group)
        called, start = recorder.mark("wait"), recorder.mark("exchange")
        if is_bucket:
            hooks.last_gradient = start  # the last bucket starts when the last gradient is computed
        work = self._inner.allreduce(tensors, options)
        _record_completion(hooks, work, start, "all-reduce", unit, tensor.nbytes, tensor.device, self._group)
        recorder.add_issuing(called)
        return work

    def getBackendName(self) -> str:
        """The real group's."""
        return str(self._inner.name())


def _pass_on(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        return getattr(self._inner, name)(*args)

    return call


for _name in _PASSED_ON:
    setattr(RecordingGroup, _name, _pass_on(_name))


def _label(group: Any) -> str:
    """The label of a group on all of its ranks: nothing for the world. Other groups may run collectives meanwhile."""
    name = str(getattr(group, "group_name", ""))
    if group is None or group is dist.group.WORLD or not name:
        return ""
    return group_label(name[:_GROUP_NAME_CHARACTERS], dist.get_process_group_ranks(group))


def _unit(name: str, group: str) -> str:
    return f"{name} of group {group}" if group else name


def _wrapper(
    hooks: LoopHooks, name: str, position: int, keyword: str, group_at: int, *, unit: str = ""
) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        # Our caller is the function that replaces the original; its caller is the code of interest.
        if torch.compiler.is_compiling() or not recorder.enabled or caller_module(2).startswith("syncline."):
            return original(*args, **kwargs)
        given_group = args[group_at] if group_at < len(args) else kwargs.get("group")
        if given_group is dist.GroupMember.NON_GROUP_MEMBER:
            return original(*args, **kwargs)
        given = args[position] if 0 <= position < len(args) else kwargs.get(keyword)
        candidates = given if isinstance(given, list | tuple) else [given]
        tensors = [tensor for tensor in candidates if isinstance(tensor, Tensor)]
        group = _label(given_group)
        of_unit = _unit(unit or f"collective {next(hooks.collective_numbers[group])}", group)
        size = sum(tensor.nbytes for tensor in tensors)
        step, called, start = recorder.step, recorder.mark("wait"), recorder.mark("exchange")
        with hooks.inside_collective():
            result = original(*args, **kwargs)
        if isinstance(result, dist.Work):
            device = tensors[0].device if tensors else torch.device("cpu")
            _record_completion(hooks, result, start, name, of_unit, size, device, group)
            if hooks.on_training_thread():
                recorder.add_issuing(called)
        else:
            end = recorder.mark("exchange")
            recorder.add("exchange", name, start, end, unit=of_unit, bytes=size, step=step, group=group)
            hooks.counts["exchange"] += 1
            if hooks.on_training_thread():
                recorder.add_blocked(start, end)
        return result

    return call


def _around_wait(hooks: LoopHooks) -> Callable[..., Any]:
    def wait(original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if torch.compiler.is_compiling() or not recorder.enabled or caller_module(2).startswith("syncline."):
            return original(work, *args, **kwargs)
        start = recorder.mark("exchange")
        result = original(work, *args, **kwargs)
        end = recorder.mark("exchange")
        if id(work) in hooks.awaited_works:
            hooks.awaited_works.pop(id(work))[1](end)
        if not hooks.collective_depth and hooks.on_training_thread():
            recorder.add_blocked(start, end)
        return result

    return wait


def _around_fsdp(hooks: LoopHooks) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if torch.compiler.is_compiling() or not recorder.enabled or not hooks.on_training_thread():
            return original(*args, **kwargs)
        start = recorder.mark("wait")
        try:
            return original(*args, **kwargs)
        finally:
            recorder.add_issuing(start)

    return call


def _record_completion(
    hooks: LoopHooks, work: Any, start: Mark, name: str, unit: str, size: int, device: torch.device, group: str
) -> None:
    """Add the span of a collective when it has completed; on CUDA at once, with an event at its end."""
    recorder = hooks.recorder
    step = recorder.step
    if start is None:
        return  # a CUDA graph is captured

    def completed(_: Any) -> None:
        recorder.add_ending_now("exchange", name, start, unit=unit, bytes=size, step=step, group=group)
        hooks.exchanges_ended += 1

    def ended(end: Mark) -> None:
        recorder.add("exchange", name, start, end, unit=unit, bytes=size, step=step, group=group)

    hooks.counts["exchange"] += 1
    try:
        future = work.get_future()
        end = recorder.mark_completion(future, device, group)
    except Exception:
        # Some collectives of Gloo have no future: they end, for us, when the loop waits for them.
        hooks.awaited_works[id(work)] = work, ended
        return
    if end is None:
        future.then(completed)
    else:
        ended(end)
        hooks.exchanges_ended += 1
    hooks.exchanges_started += 1
