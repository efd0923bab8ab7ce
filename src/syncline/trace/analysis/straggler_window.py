"""The straggler of a few recorded steps, from when each rank joined their exchanges; cheap enough for a running job.

`late_ranks` does this exactly for a whole trace. Here a rank sends only its joins and the length of its lanes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from syncline.stats import median_or_zero
from syncline.trace.analysis.late_ranks import SHARE
from syncline.trace.merge.exchanges import Exchange, match_exchanges
from syncline.trace.span import STEP, TRAINING_LANES, Span, rank_list

LEAST_MS, LEAST_SHARE = 1.0, 0.03
"""Delays below this, in ms or as a share of the step, are not worth a message."""
LEAST_STEPS, LEAST_OFTEN = 8, 0.75
"""Steps to compare, and the share of them in which a straggler is late: ranks are late in turn on a busy machine."""
_EXPLAINS = 0.5  # share of the delay that a lane must explain to be named
_LONG = {"data": "data loading", "between": "work between steps", "update": "the optimizer's step"}


@dataclass
class RankSteps:
    """Recorded steps of one rank: the exchanges that it joined, and by step the nanoseconds of its lanes."""

    rank: int
    host: str = ""
    """Ranks with the same text read the same clock."""
    node: str = ""
    joins: list[Span] = field(default_factory=list)
    lanes: dict[int, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Sequence[Span], *, rank: int, host: str, node: str) -> "RankSteps":
        """From the spans of whole steps; steps without a step span were not sampled."""
        found = cls(rank, host, node)
        for span in spans:
            if span.lane == STEP:
                found.lanes.setdefault(span.step, {})[STEP] = span.end - span.start
        for span in spans:
            if span.step in found.lanes and span.lane == "exchange":
                found.joins.append(span)
            elif span.step in found.lanes and span.lane in TRAINING_LANES:
                lanes = found.lanes[span.step]
                lanes[span.lane] = lanes.get(span.lane, 0) + span.end - span.start
        return found

    def as_json(self) -> dict[str, Any]:
        """For the other ranks."""
        lanes = {str(step): row for step, row in self.lanes.items()}
        joins = [span.to_row() for span in self.joins]
        return {"rank": self.rank, "host": self.host, "node": self.node, "joins": joins, "lanes": lanes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RankSteps":
        """What `as_json` made."""
        joins = [Span.from_row(data["rank"], row) for row in data["joins"]]
        return cls(data["rank"], data["host"], data["node"], joins, {int(k): row for k, row in data["lanes"].items()})


@dataclass(frozen=True)
class Straggler:
    """Ranks that joined the exchanges of most steps later than the others: by how much, and in which lane."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    delay_ms: float
    """The median over the steps in which they were late."""
    step_ms: float
    steps: int
    last_step: int
    lane: str = ""
    lane_ms: float = 0.0
    """How much longer than the others they are in that lane."""

    @property
    def sentence(self) -> str:
        """For the log."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {rank_list(self.ranks)}"
        where = f" ({', '.join(self.nodes)})" if any(self.nodes) else ""
        joins = "joins" if len(self.ranks) == 1 else "join"
        text = (
            f"{who}{where} {joins} exchanges {self.delay_ms:.3g} ms after the others,"
            f" {self.delay_ms / self.step_ms:.0%} of a step (median of {self.steps} steps up to step {self.last_step})"
        )
        return f"{text}: {self.lane_ms:.3g} ms more in {_LONG.get(self.lane, self.lane)}" if self.lane else text


def find_straggler(ranks: Sequence[RankSteps]) -> Straggler | None:
    """The ranks that the others waited for in most of the steps that all have recorded; None if there are none."""
    if len(ranks) < 2:
        return None
    common = set.intersection(*(set(one.lanes) for one in ranks))
    _, exchanges = match_exchanges([s for one in ranks for s in one.joins if s.step in common], split=False)
    exchanges = [exchange for exchange in exchanges if len(exchange.members) > 1]
    offsets = _clock_offsets(exchanges, {one.rank: one.host for one in ranks})
    delays: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for exchange in exchanges:
        late, gap = late_together(sorted((joined - offsets[rank], rank) for rank, joined in exchange.joined.items()))
        if late:
            delays[late][exchange.step] = max(gap, delays[late].get(exchange.step, 0.0))
    if not delays:
        return None
    worst = max(delays, key=lambda late: sum(delays[late].values()))
    mine = delays[worst]
    whole = sum(sum(of.values()) for of in delays.values())
    step_ms = median([one.lanes[step][STEP] for one in ranks for step in common]) / 1e6
    delay_ms = median(mine.values()) / 1e6
    often = len(mine) >= LEAST_OFTEN * max(LEAST_STEPS, len(common)) and sum(mine.values()) >= SHARE * whole
    if not often or delay_ms < max(LEAST_MS, LEAST_SHARE * step_ms):
        return None
    lane, lane_ms = _longer_lane(ranks, worst, sorted(mine))
    if lane_ms < _EXPLAINS * delay_ms:
        lane, lane_ms = "", 0.0
    nodes = tuple(sorted({one.node for one in ranks if one.rank in worst}))
    return Straggler(worst, nodes, delay_ms, step_ms, len(mine), max(mine), lane, lane_ms)


def late_together(order: Sequence[tuple[float, int]]) -> tuple[tuple[int, ...], float]:
    """The ranks behind the largest gap between arrivals, and that gap; no ranks if they would be more than half.

    `order`: times and ranks, sorted.

    >>> late_together([(0, 3), (1, 0), (2, 1), (50, 2)])
    ((2,), 48)
    """
    gaps = [order[place][0] - order[place - 1][0] for place in range(1, len(order))]
    place = gaps.index(max(gaps)) + 1
    if place < (len(order) + 1) // 2:
        return (), 0.0
    return tuple(sorted(rank for _, rank in order[place:])), gaps[place - 1]


def _clock_offsets(exchanges: Sequence[Exchange], hosts: Mapping[int, str]) -> dict[int, float]:
    """By rank: how far its clock is ahead of the first rank's: a collective ends at about the same time everywhere."""
    first = hosts[min(hosts)]
    apart: dict[str, list[float]] = defaultdict(list)
    for exchange in exchanges:
        ends: dict[str, list[int]] = defaultdict(list)
        for rank, ended in exchange.ended.items():
            ends[hosts[rank]].append(ended)
        if first in ends:
            for host, mine in ends.items():
                apart[host].append(median(mine) - median(ends[first]))
    return {rank: 0.0 if host == first else median_or_zero(apart[host]) for rank, host in hosts.items()}


def _longer_lane(ranks: Sequence[RankSteps], late: tuple[int, ...], steps: Sequence[int]) -> tuple[str, float]:
    """The lane in which the late ranks take the longest compared with the others, and how much longer, in ms."""
    best, most = "", 0.0
    for lane in TRAINING_LANES:
        by_rank = {one.rank: median([one.lanes[step].get(lane, 0) for step in steps]) for one in ranks}
        mine = median([ns for rank, ns in by_rank.items() if rank in late])
        longer = (mine - median([ns for rank, ns in by_rank.items() if rank not in late])) / 1e6
        if longer > most:
            best, most = lane, longer
    return best, most
