"""The events of a torch.profiler trace that are kept while it is read: work of threads, kernels, collectives."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from syncline.trace.formats.trace_file import Step
from syncline.trace.span import MAX_TIME_NS

Thread = int | str
"""A thread's name in a trace."""

BEFORE = -MAX_TIME_NS
"""The time of a launch before the trace."""


class Interval(NamedTuple):
    """An interval of work of a thread, a kernel, or a collective.

    `kind` is a lane. Before the lanes of a thread are known it can also be `op` (an op of any lane) or `finish` (DDP's
    copies after the backward pass). A kernel's kind is `kernel`, or `copy` (of an input to the GPU); a collective's is
    its name; an operator's or a runtime call's is its name.
    """

    start: int
    end: int
    kind: str
    step: int = -1
    bytes: int = 0
    correlation: int = -1
    name: str = ""
    """A kernel's name, as in the trace."""
    operator: str = ""
    """The operator that launched a kernel."""
    stream: str = ""
    group: str = ""
    """The process group of a collective, empty for all ranks and where it is unknown."""
    sequence: int = -1
    """The number of a collective in its group; -1 where it is unknown."""


class Launch(NamedTuple):
    """The call that started work of the GPU."""

    thread: Thread
    start: int
    end: int
    name: str


@dataclass
class Rows:
    """The kept events: `launches` of kernels by correlation id, `calls` of collectives by thread.

    Also by thread: `sized` are calls of collectives that say how large their messages are, `ops` operators, `ranges`
    those that the user named, `optimizer` the optimizer's steps, `syncs` calls of the CUDA runtime that wait for the
    GPU, and `runtime` other long calls of it.
    """

    steps: list[tuple[Step, Thread]] = field(default_factory=list)
    host: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    kernels: list[Interval] = field(default_factory=list)
    launches: dict[int, Launch] = field(default_factory=dict)
    collectives: list[Interval] = field(default_factory=list)
    calls: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    sized: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    ops: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    ranges: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    optimizer: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    syncs: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    runtime: dict[Thread, list[Interval]] = field(default_factory=lambda: defaultdict(list))

    def launched(self, work: Interval) -> int:
        """When the host launched a kernel or a collective; its own start where that is unknown."""
        launch = self.launches.get(work.correlation)
        return work.start if launch is None else launch.start

    def mark_earlier_launches(self) -> None:
        """Note that work without a launch that runs before any with a launch on its stream is of an earlier time.

        The profiler saw it run, but not its launch: the GPU was behind its host when the profiler started.
        """
        first: dict[str, int] = {}
        work = [one for one in (*self.kernels, *self.collectives) if one.correlation > 0]
        for one in work:
            if one.correlation in self.launches:
                first[one.stream] = min(one.start, first.get(one.stream, one.start))
        for one in work:
            if one.correlation not in self.launches and one.start < first.get(one.stream, one.start):
                self.launches[one.correlation] = Launch(0, BEFORE, BEFORE, "")


def outermost(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals without those that lie inside others, in order; where two overlap, the later one is cut."""
    result: list[Interval] = []
    for interval in sorted(intervals, key=lambda p: (p.start, -p.end)):
        at = result[-1].end if result else interval.start
        if interval.end > at:
            result.append(interval._replace(start=max(interval.start, at)))
    return result
