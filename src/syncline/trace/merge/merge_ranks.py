"""The merged trace: spans of all ranks on rank 0's clock, with exchanges matched across ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.exchanges import Exchange, match_exchanges
from syncline.trace.span import Span

WAITS_UNKNOWN = ("cannot be separated from transfers", "waits for a late rank are not")
"""A note with one of these says that waits for a late rank are unknown; the second is in files of earlier versions."""


@dataclass(frozen=True)
class Part:
    """One rank's spans on its own clock, and what is known about that clock and the rank."""

    rank: int
    spans: Sequence[Span]
    host: str = ""
    """Ranks with the same text read the same clock (`clocks.host_id()`)."""
    clock: Clock | None = None
    """As measured against rank 0; None where it was not measured."""
    cores: int = 0
    """How many cores its process may use; 0 if unknown."""
    cpu_times: Sequence[Sequence[int]] = ()
    """Rows of step, nanoseconds of CPU time, nanoseconds of scheduling delay."""
    recording_cost: Mapping[str, Any] = field(default_factory=dict)
    """The entry `recorder` of the metadata; its `overhead_ns_per_step` is None if unknown."""
    node: str = ""
    """The name of its host that people know; empty if unknown."""


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks on one clock, and their exchanges; `Trace.of` makes one from spans."""

    spans: list[Span]
    exchanges: list[Exchange]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run and its ranks, such as `world_size`, `backend` and `clock_error_ns`."""
    notes: tuple[str, ...] = ()
    """Sentences about missing or doubtful data."""
    path: Path = Path()
    """The file or folder that it was read from."""

    @classmethod
    def of(
        cls,
        spans: Iterable[Span],
        *,
        metadata: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        path: Path = Path(),
        split: bool = True,
    ) -> "Trace":
        """A trace from spans on one clock. `split=False` keeps exchanges whole: the clocks cannot be compared."""
        spans, exchanges = match_exchanges(spans, split=split)
        return cls(spans, exchanges, metadata or {}, tuple(notes), path)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans."""
        return tuple(sorted({span.rank for span in self.spans}))

    def by_rank(self) -> dict[int, list[Span]]:
        """The spans of each rank."""
        found: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One dict per span, in the order of starts: `start_ms` counts from the first span, `ms` is the duration."""
        spans = sorted(self.spans, key=lambda span: (span.start, span.end))
        origin = spans[0].start if spans else 0
        return [
            {
                "rank": span.rank, "step": span.step, "lane": span.lane, "name": span.name, "unit": span.unit,
                "group": span.group, "stream": span.stream, "start_ms": (span.start - origin) / 1e6,
                "ms": (span.end - span.start) / 1e6, "bytes": span.bytes, "start_ns": span.start, "end_ns": span.end,
            }
            for span in spans
        ]  # fmt: skip

    def frame(self) -> Any:
        """`rows()` as a pandas `DataFrame` if pandas is installed, else the list itself."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            return self.rows()
        return pandas.DataFrame(self.rows())

    @property
    def clock_error_ns(self) -> float | None:
        """The largest possible error between times of different ranks; None where a clock was not measured."""
        error: float | None = self.metadata.get("clock_error_ns", 0.0)
        return error

    @property
    def on_gpu(self) -> bool:
        """Whether its compute ran on GPUs, so that data loading and other work of the host may run behind it."""
        return self.metadata.get("backend") == "nccl" or any(span.stream for span in self.spans)

    @property
    def folder(self) -> Path:
        """The folder that it was read from."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def waits_unknown(self) -> str | None:
        """Why waits for a late rank cannot be separated from transfers; None where they can.

        All ranks must be in the trace, on one clock.
        """
        if self.metadata.get("aligned", True) is False or self.clock_error_ns is None:
            return "not all ranks' clocks could be compared"
        world, ranks = self.metadata.get("world_size"), len(self.ranks)
        return f"the trace has {ranks} of {world} ranks" if type(world) is int and world > ranks else None


def merge(parts: Sequence[Part]) -> Trace:
    """One trace from the ranks' own spans; waits are split off where all clocks are known.

    Ranks of rank 0's host need no measurement. If several ranks of another host were measured, the best measurement
    counts for all of them.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    known = [(part.host, part.clock) for part in parts if part.clock is not None]
    # Without rank 0, clocks that were measured against it still agree. Without any measurement, the first clock counts.
    zero = next((part.host for part in parts if part.rank == 0 or not known), None)
    clocks = dict(sorted(known, key=lambda pair: -pair[1].error))  # of several for a host, the best one is kept
    if zero is not None:
        clocks[zero] = Clock()
    spans = [_aligned(span, clocks.get(part.host, Clock())) for part in parts for span in part.spans]
    metadata = _rank_metadata(parts)
    if unknown := [str(part.rank) for part in parts if part.host not in clocks]:
        who = f"rank{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}"
        note = f"{who} ran on another host and no clock was measured: times are not aligned there, and waits for a late"
        note += f" rank {WAITS_UNKNOWN[0]}"
        return Trace.of(spans, metadata=metadata | {"clock_error_ns": None}, notes=[note], split=False)
    error = max((clock.error for clock in clocks.values()), default=0.0)
    return Trace.of(spans, metadata=metadata | {"clock_error_ns": error})


def _rank_metadata(parts: Sequence[Part]) -> dict[str, Any]:
    """The metadata about ranks; unknown entries are left out. A host has the most cores that a rank of it may use."""
    metadata: dict[str, Any] = {}
    cores: dict[str, int] = {}
    for part in parts:
        if part.cores:
            cores[part.host] = max(part.cores, cores.get(part.host, 0))
    if cores:
        metadata |= {"hosts": {str(part.rank): part.host for part in parts}, "cores": cores}
    if any(part.node for part in parts):
        metadata["nodes"] = {str(part.rank): part.node for part in parts}
    if usage := {str(part.rank): [list(row) for row in part.cpu_times] for part in parts if part.cpu_times}:
        metadata["usage"] = usage
    if costs := [part.recording_cost for part in parts if part.recording_cost]:
        most_expensive = max(costs, key=lambda cost: cost["overhead_ns_per_step"] or 0.0)
        known = {key: value for key, value in most_expensive.items() if value is not None}
        metadata["recorder"] = known | {"dropped": sum(cost["dropped"] for cost in costs)}
    return metadata


def _aligned(span: Span, clock: Clock) -> Span:
    if clock == Clock():
        return span
    return replace(span, start=clock.align(span.start), end=clock.align(span.end))
