"""Reads a torch.profiler (Kineto) trace: the events that tell about lanes, collectives and steps."""

import re
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import UsageError
from syncline.trace.formats.collective_names import collective
from syncline.trace.formats.profiler_messages import message_bytes, message_group, message_peers
from syncline.trace.formats.profiler_rows import Interval, Launch, Rows, Thread
from syncline.trace.formats.profiler_spans import spans_of
from syncline.trace.formats.repeated_steps import OPTIMIZER_STEP
from syncline.trace.formats.trace_file import RankTrace, TraceFile, fields, text, times, whole
from syncline.trace.span import POINT_TO_POINT, is_copy_name
from syncline.wording import plural

KIND = "torch.profiler"
"""The name of this format."""

_HOST = frozenset({"cpu_op", "user_annotation", "python_function", "operator"})
_RUNTIME = frozenset(
    {"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "runtime"}
)
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_HEADER = ("distributedInfo", "schemaVersion", "baseTimeNanoseconds")
_STEP = re.compile(r"ProfilerStep#\d{1,9}$", re.ASCII)
_RANGE = re.compile(r"(?:gloo|mpi|ucc):")  # nccl:... on the host may be the launch alone
# Calls of CUDA, HIP and XPU (SYCL's unified runtime, Level Zero).
_STARTS = re.compile(r"Launch|[mM]em(?:cpy|set|oryCopy|oryFill)|EnqueueUSM")
_WAITS = re.compile(r"Synchronize|(?:cuda|hip)Memcpy(?:2D|3D|WithStream)?$|Events?Wait$|QueueFinish$")
_COLLECTIVE = re.compile(r"(?:void )?(?:nccl|rccl|msccl|oneccl)")
_TO_DEVICE = re.compile(r"HtoD|H2D|M2D|HostToDevice")
_LONG_CALL = 10_000  # nanoseconds: shorter calls of the runtime explain no gap
_PREFIXES = (
    ("autograd::engine::evaluate_function", "backward"),
    ("torch::autograd::", "backward"),
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
# A node of the autograd graph: profilers of 2021 have no range around it.
_NODE = re.compile(r"\w+Backward\d*$", re.ASCII)
# Ranges that users write. Not "backward": a user's range would hide DDP's wait at its end; autograd's ranges do not.
_WORDS = {
    "data": "data", "dataload": "data", "dataloading": "data", "dataloader": "data", "loaddata": "data",
    "forward": "forward", "fwd": "forward", "update": "update", "optimizer": "update", "optimizerstep": "update",
}  # fmt: skip


def recognises(file: TraceFile, event: dict[str, Any]) -> bool:
    """Whether the header or one event shows that torch.profiler wrote the file."""
    return any(key in file.header for key in _HEADER) or event.get("cat") in (*_HOST, *_RUNTIME, *_DEVICE)


def read(file: TraceFile) -> list[RankTrace]:
    """The one rank of the file."""
    reader = _Reader(file)
    for event in file.events():
        reader.add(event)
    if file.cut:
        # Its events are not in time order, so a part of them would look like a whole trace.
        raise UsageError(f"{file.path} ends {file.cut}: export it again")
    info = _distributed_info(file)
    base = whole(file.header.get("baseTimeNanoseconds"), 0)
    rank = whole(info.get("rank"))
    found = spans_of(reader.rows, rank=rank, base=base)
    if reader.untimed:
        found.notes.append(f"{plural(reader.untimed, 'event')} with a missing, negative or impossible time: left out")
    if file.odd or reader.odd:
        found.notes.append(f"{plural(file.odd + reader.odd, 'entry')} that are not valid events: left out")
    return [
        RankTrace(
            file.path, rank, found.spans, found.notes, world=_world(file), pid=reader.pid,
            host=text(file.header.get("host_name")), absolute=base > 0, gpu=found.gpu, sequences=found.sequences,
            groups=_groups(info), operators=found.operators,
        )
    ]  # fmt: skip


def _distributed_info(file: TraceFile) -> dict[str, Any]:
    info = file.header.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _groups(info: dict[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and ranks of the process groups that the header lists."""
    found = []
    listed = info.get("pg_config")
    for group in listed if isinstance(listed, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            found.append((text(group.get("pg_name")), tuple(sorted(ranks))))
    return tuple(found)


def _world(file: TraceFile) -> int:
    """The job's number of ranks; 0 if the file does not say, or not yet."""
    return whole(_distributed_info(file).get("world_size"), 0)


@dataclass
class _Reader:
    """Keeps the needed part of each event; nested ops, which are nearly all, are dropped while reading."""

    file: TraceFile
    rows: Rows = field(default_factory=Rows)
    odd: int = 0
    untimed: int = 0
    pid: str = ""
    _last: dict[Thread, tuple[int, int]] = field(default_factory=dict)
    _last_op: dict[Thread, tuple[int, int]] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """Process one event."""
        if event.get("ph") != "X":
            return
        category = event.get("cat")
        category = category.lower() if isinstance(category, str) else ""
        host = category in _HOST
        if not host and category not in _RUNTIME and category not in _DEVICE:
            return
        when, thread, name = times(event), event.get("tid"), event.get("name")
        if when is None:
            self.untimed += 1
        elif not isinstance(thread, int | str) or not isinstance(name, str):
            self.odd += 1
        elif host:
            self._host(event, category, name, thread, *when)
        elif category in _RUNTIME:
            self._call(event, name, thread, *when)
        else:
            self.file.keep()
            self._device(event, category, name, *when)

    def _call(self, event: dict[str, Any], name: str, thread: Thread, start: int, end: int) -> None:
        correlation = whole(fields(event).get("correlation"))
        if _WAITS.search(name):
            self.file.keep()
            self.rows.syncs[thread].append(Interval(start, end, text(name)))
        if correlation > 0 and _STARTS.search(name):
            self.file.keep()
            self.rows.launches[correlation] = Launch(thread, start, end, text(name))
        elif end - start >= _LONG_CALL:
            self.file.keep()
            self.rows.runtime[thread].append(Interval(start, end, text(name)))

    def _host(self, event: dict[str, Any], category: str, name: str, thread: Thread, start: int, end: int) -> None:
        kind = _kind(name, category)
        begin, finish = self._last_op.get(thread, (0, -1))
        # Ops inside others are nearly all; the outermost ones name what the host did and which op started a kernel.
        if kind in ("op", "launch") and not (begin <= start and end <= finish):
            self.file.keep()
            self._last_op[thread] = (start, end)
            self.rows.ops[thread].append(Interval(start, end, text(name)))
        elif not kind and category == "user_annotation":
            self.file.keep()
            self.rows.ranges[thread].append(Interval(start, end, text(name)))
        begin, finish = self._last.get(thread, (0, -1))
        if not kind or (kind not in ("launch", "sized", "range", "step") and begin <= start and end <= finish):
            return
        self.file.keep()
        if kind in ("launch", "sized"):
            row = self._collective(event, name, start, end)
            if kind == "launch":
                self.rows.calls[thread].append(row)
            if row.bytes or row.group or row.sequence >= 0:
                self.rows.sized[thread].append(row)
        elif kind == "range":
            self.rows.collectives.append(self._collective(event, name.partition(":")[2], start, end))
        elif kind == "step":
            self.pid = text(str(event.get("pid")))
            self.rows.steps.append(((int(name.partition("#")[2]), start, end), thread))
        else:
            self._last[thread] = (start, end)
            self.rows.host[thread].append(Interval(start, end, kind))
            if name.startswith(OPTIMIZER_STEP):
                self.rows.optimizer[thread].append(Interval(start, end, text(name)))

    def _collective(self, event: dict[str, Any], name: str, start: int, end: int) -> Interval:
        title = collective(text(fields(event).get("Collective name")) or name)
        group, sequence = message_group(event, world=_world(self.file))
        if title in ("send", "recv", "send-recv"):
            rank = whole(_distributed_info(self.file).get("rank"))
            if peers := message_peers(event, name, rank=rank):
                # Each rank numbers its own messages, so the numbers of both sides differ.
                title, group, sequence = POINT_TO_POINT, f"{group}, {peers}" if group else peers, -1
        return Interval(start, end, title, bytes=message_bytes(event), group=group, sequence=sequence)

    def _device(self, event: dict[str, Any], category: str, name: str, start: int, end: int) -> None:
        args = fields(event)
        correlation = whole(args.get("correlation"))
        stream = text(str(args.get("stream", event.get("tid"))).removeprefix("stream "))
        if _COLLECTIVE.match(name) or "Collective name" in args:
            row = self._collective(event, name, start, end)
            self.rows.collectives.append(row._replace(correlation=correlation, stream=stream))
        else:
            # A copy of an input to the GPU belongs to data; a copy back belongs to the lane that asked for it.
            kind = "copy" if category.endswith("memcpy") and _TO_DEVICE.search(name) else "kernel"
            if category.endswith(("memcpy", "memset")) and not is_copy_name(name):
                name = f"{'Memcpy' if category.endswith('memcpy') else 'Memset'} {name}"
            row = Interval(start, end, kind, correlation=correlation, name=text(name), stream=stream)
            self.rows.kernels.append(row)


def _kind(name: str, category: str) -> str:
    """The kind of a host event: a lane, another kind of `Interval`, a step, or a collective's range or launch."""
    if _STEP.match(name):
        return "step"
    for prefix, kind in _PREFIXES:
        if name.startswith(prefix):
            return kind
    # Profilers of 2021 write ranges as operators.
    if category in ("user_annotation", "operator"):
        if _RANGE.match(name):
            return "range"
        if name.startswith(("nccl:", "rccl:")):
            return "sized"
        word = re.sub(r"[^a-z]", "", name[:64].lower())
        if category == "user_annotation" or word in _WORDS:
            return _WORDS.get(word, "")
    if _NODE.match(name):
        return "backward"
    return "" if category == "python_function" else "op"
