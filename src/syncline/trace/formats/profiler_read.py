"""Reads a torch.profiler (Kineto) trace: the events that tell about lanes, collectives and steps."""

import re
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import UsageError
from syncline.trace.formats.collective_names import collective, elements, item_size
from syncline.trace.formats.profiler_spans import Interval, Rows, Thread, spans_of
from syncline.trace.formats.trace_file import RankTrace, TraceFile, fields, text, times, whole

KIND = "torch.profiler"
"""The name of this format."""

_HOST = frozenset({"cpu_op", "user_annotation", "python_function", "operator"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver", "runtime"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HEADER = ("distributedInfo", "schemaVersion", "baseTimeNanoseconds")
_STEP = re.compile(r"ProfilerStep#\d{1,9}$", re.ASCII)
_RANGE = re.compile(r"(?:gloo|mpi|ucc):")  # nccl:... on the host is the launch alone
_STARTS = re.compile(r"Launch|[mM]em(?:cpy|set)")
_PREFIXES = (
    ("autograd::engine::evaluate_function", "backward"),
    ("torch.distributed.ddp.reducer::", "finish"),
    ("torch::distributed::reducer::", "finish"),
    ("c10d::", "launch"),
    ("record_param_comms", "launch"),
    ("enumerate(DataLoader)", "data"),
    ("Optimizer.", "update"),
    ("DistributedDataParallel.forward", "forward"),
    ("FullyShardedDataParallel.forward", "forward"),
    ("nn.Module: ", "forward"),
)
# Ranges that users write. Not "backward": a user's range would hide DDP's wait at its end; autograd's ranges do not.
_WORDS = {
    "data": "data", "dataload": "data", "dataloading": "data", "dataloader": "data", "loaddata": "data",
    "forward": "forward", "fwd": "forward", "update": "update", "optimizer": "update", "optimizerstep": "update",
}  # fmt: skip


def recognises(file: TraceFile, event: dict[str, Any]) -> bool:
    """Whether the header or one event shows that torch.profiler wrote the file."""
    return any(key in file.header for key in _HEADER) or event.get("cat") in (*_HOST, *_LAUNCH, *_DEVICE)


def read(file: TraceFile) -> list[RankTrace]:
    """The one rank of the file."""
    reader = _Reader(file)
    for event in file.events():
        reader.add(event)
    if file.cut:
        # Its events are not in time order, so a part of them would look like a whole trace.
        raise UsageError(f"{file.path} ends {file.cut}: export it again")
    info = file.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    base = whole(file.header.get("baseTimeNanoseconds"), 0)
    rank = whole(info.get("rank"))
    spans, notes = spans_of(reader.rows, rank=rank, base=base)
    if file.odd or reader.odd:
        notes.append(f"{file.odd + reader.odd} entries that are not valid events were left out")
    return [
        RankTrace(
            file.path, rank, spans, notes, world=whole(info.get("world_size"), 0), pid=reader.pid,
            host=text(file.header.get("host_name")), absolute=base > 0,
        )
    ]  # fmt: skip


@dataclass
class _Reader:
    """Keeps the needed part of each event; nested ops, which are nearly all, are dropped while reading."""

    file: TraceFile
    rows: Rows = field(default_factory=Rows)
    odd: int = 0
    pid: str = ""
    _last: dict[Thread, tuple[int, int]] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """Process one event."""
        if event.get("ph") != "X":
            return
        category = event.get("cat")
        category = category.lower() if isinstance(category, str) else ""
        host = category in _HOST
        if not host and category not in _LAUNCH and category not in _DEVICE:
            return
        when, thread, name = times(event), event.get("tid"), event.get("name")
        if when is None or not isinstance(thread, int | str) or not isinstance(name, str):
            self.odd += 1
        elif host:
            self._host(event, category, name, thread, *when)
        elif category in _LAUNCH:
            correlation = whole(fields(event).get("correlation"))
            if correlation > 0 and _STARTS.search(name):
                self.file.keep()
                self.rows.launches[correlation] = (thread, when[0])
        else:
            self.file.keep()
            self._device(event, category, name, *when)

    def _host(self, event: dict[str, Any], category: str, name: str, thread: Thread, start: int, end: int) -> None:
        kind = _kind(name, category)
        begin, finish = self._last.get(thread, (0, -1))
        if not kind or (kind not in ("launch", "range", "step") and begin <= start and end <= finish):
            return
        self.file.keep()
        if kind == "launch":
            self.rows.calls[thread].append(Interval(start, end, collective(name), bytes=_message(event)))
        elif kind == "range":
            title = collective(name.partition(":")[2])
            self.rows.collectives.append(Interval(start, end, title, bytes=_message(event)))
        elif kind == "step":
            self.pid = text(str(event.get("pid")))
            self.rows.steps.append(((int(name.partition("#")[2]), start, end), thread))
        else:
            self._last[thread] = (start, end)
            self.rows.host[thread].append(Interval(start, end, kind))

    def _device(self, event: dict[str, Any], category: str, name: str, start: int, end: int) -> None:
        args = fields(event)
        correlation = whole(args.get("correlation"))
        if name.startswith(("nccl", "rccl")) or "Collective name" in args:
            title = collective(text(args.get("Collective name")) or name)
            count = max(whole(args.get("In msg nelems"), 0), whole(args.get("Out msg nelems"), 0))
            size = count * item_size(args.get("dtype"))
            self.rows.collectives.append(Interval(start, end, title, bytes=size, correlation=correlation))
        else:
            # A copy of an input to the GPU belongs to data; a copy back belongs to the lane that asked for it.
            kind = "copy" if category == "gpu_memcpy" and "HtoD" in name else "kernel"
            self.rows.kernels.append(Interval(start, end, kind, correlation=correlation))


def _kind(name: str, category: str) -> str:
    """The kind of a host event: a lane, another kind of `Interval`, a step, or a collective's range or launch."""
    for prefix, kind in _PREFIXES:
        if name.startswith(prefix):
            return kind
    if category == "user_annotation":
        if _STEP.match(name):
            return "step"
        if _RANGE.match(name):
            return "range"
        word = re.sub(r"[^a-z]", "", name[:64].lower())
        return _WORDS.get(word, "")
    return "" if category == "python_function" else "op"


def _message(event: dict[str, Any]) -> int:
    """Bytes of a message, from the shapes that a trace has with `record_shapes=True`."""
    args = fields(event)
    shapes, kinds = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(kinds, list):
        return 0
    return sum(elements(shape) * item_size(kind) for shape, kind in zip(shapes, kinds, strict=False))
