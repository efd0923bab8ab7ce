"""Rows of `bench overlap`, computed from turns: step times, paired ratios, bounds. Pure functions.

A turn is compared with the other contestants' turns of the same round, so that a slow phase of the machine cancels. The
reported ratio is the median over the rounds.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from syncline.bench.timing import ratios
from syncline.spec import Call, parse_one
from syncline.stats import median
from syncline.train.strategies import STRATEGIES, load
from syncline.train.strategies.classical import Local
from syncline.train.strategies.syncline import Syncline

_LAST = 5
"""Steps over which the final loss is averaged."""


@dataclass
class Entry:
    """All that is known of one contestant. A turn has its round, its steady step times, and bytes per step."""

    strategy: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    warm_up: dict[str, Any] | None = None
    memory: int | None = None
    """Peak memory in bytes of the rank with the most."""

    @property
    def step_ms(self) -> float | None:
        """The median over the rounds."""
        return median(list(self.by_round.values())) if self.turns else None

    @property
    def by_round(self) -> dict[int, float]:
        """The mean step of each round. Not the median: one step may wait for what spares another step a wait."""
        return {turn["round"]: sum(turn["step_ms"]) / len(turn["step_ms"]) for turn in self.turns}


def steady_ms(steps: Sequence[Sequence[int]], *, lead: int) -> list[float]:
    """Milliseconds from the start of a step to the start of the next one, without the first `lead` steps of a turn.

    Exchanges reach into the next step, so the length of a single step means nothing. The first steps of a turn find the
    network idle. No step starts after the last one, so it does not count either.

    >>> steady_ms([[0, 4_000_000], [5_000_000, 9_000_000], [12_000_000, 18_000_000]], lead=1)
    [7.0]
    """
    return [(after - before) / 1e6 for (before, _), (after, _) in pairwise(steps)][lead:]


def turn_steps(step_s: float, *, seconds: float, most: int, least: int = 3) -> int:
    """Number of steps that count in a turn of about `seconds` seconds.

    >>> [turn_steps(s, seconds=4, most=20) for s in (0.03, 0.5, 4.8)]
    [20, 8, 3]
    """
    return max(min(least, most), min(most, round(seconds / max(step_s, 1e-6))))


def kind_of(strategy: str) -> str:
    """`compute` (nothing exchanged), `ours` (the engine) or `rival`."""
    made = load(strategy)
    if made.alone or isinstance(made, Local):
        return "compute"
    return "ours" if isinstance(made, Syncline) else "rival"


def family_of(strategy: str) -> str:
    """A rival without its bucket size and the like: of contestants that send the same, the fastest is the rival.

    >>> family_of("ddp-powersgd(rank=64, bucket_mb=5)"), family_of("ddp(5)"), family_of("horovod(cycle_ms=5)")
    ('ddp-powersgd(rank=64)', 'ddp', 'horovod')
    """
    call = parse_one(strategy)
    named = dict(inspect.signature(STRATEGIES.get(call.name)).bind(*call.args, **call.kwargs).arguments)
    tuning = load(strategy).tuning
    return str(Call(call.name, kwargs={key: value for key, value in named.items() if key not in tuning}))


def rivals(entries: Sequence[Entry]) -> dict[str, Entry]:
    """The fastest of each family; a crashed one only if no other has a time."""
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        if kind_of(entry.strategy) == "rival" and entry.turns:
            families.setdefault(family_of(entry.strategy), []).append(entry)
    return {
        family: min(members, key=lambda entry: (entry.error is not None, entry.step_ms or 0.0))
        for family, members in families.items()
    }


def flat_twin(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """For a hierarchical contestant, the fastest with the same codec over another exchange."""
    mine = load(entry.strategy)
    if not isinstance(mine, Syncline) or mine.carrier.definition.name != "hierarchical":
        return None
    others = [(other, load(other.strategy)) for other in entries if other.turns]
    flat = [
        other
        for other, made in others
        if isinstance(made, Syncline) and made.carrier.definition.name != "hierarchical"
        if not made.auto and not made.plan and made.compress == mine.compress
    ]
    return min(flat, key=lambda other: other.step_ms or 0.0, default=None)


def best_rival(entries: Sequence[Entry]) -> Entry | None:
    """The fastest of all rivals; a crashed one only if no other has a time."""
    best = rivals(entries).values()
    return min(best, key=lambda entry: (entry.error is not None, entry.step_ms or 0.0), default=None)


def compare(mine: Entry, other: Entry) -> dict[str, Any] | None:
    """Time of the other / our time: median and range over the rounds that both ran."""
    ours, theirs = mine.by_round, other.by_round
    common = [number for number in sorted(ours) if number in theirs]
    if not common:
        return None
    found = ratios([theirs[number] for number in common], [ours[number] for number in common])
    spread = {"median": median(found), "low": min(found), "high": max(found)}
    return {"against": other.strategy, **spread, "rounds": found}


def rows(entries: Sequence[Entry], *, bytes_per_s: float | None) -> list[dict[str, Any]]:
    """One row per contestant. If the rate of the link is unknown, so is the network time; the bound is then compute."""
    best, fastest = rivals(entries), best_rival(entries)
    compute = next((e.step_ms for e in entries if isinstance(load(e.strategy), Local)), None)
    # The losses of a contestant that sends uncompressed gradients.
    dense = next((e.losses for e in entries if e.error is None and load(e.strategy).formula == "2(N-1)/N*S"), [])
    last = common_steps(entries)
    made = []
    for entry in entries:
        step, medians = entry.step_ms, list(entry.by_round.values())
        moved = [turn["wire_bytes"] for turn in entry.turns if turn["wire_bytes"] is not None]
        # The minimum, because some turns include a probe of the network by the engine.
        wire_bytes = min(moved, default=None)
        wire = wire_bytes / bytes_per_s * 1e3 if wire_bytes is not None and bytes_per_s else None
        known = [ms for ms in (compute, wire) if ms is not None]
        bound = max(known) if compute is not None else None
        predicted = entry.plans[0]["predicted_ms"] if len(entry.plans) == 1 else None
        kind = kind_of(entry.strategy)
        others = best if kind == "ours" else {}
        flat = flat_twin(entry, entries)
        made.append(
            {
                "strategy": entry.strategy,
                "kind": kind,
                "family": family_of(entry.strategy) if kind == "rival" else None,
                "best_of_family": any(entry is rival for rival in best.values()),
                "status": "ok" if entry.error is None else "crashed",
                "error": entry.error,
                "step_ms": step,
                "step_ms_low": min(medians, default=None),
                "step_ms_high": max(medians, default=None),
                "times_faster_than_best": compare(entry, fastest) if others and fastest and medians else None,
                "times_faster_than": {family: compare(entry, rival) for family, rival in others.items() if medians},
                "times_faster_than_flat": None if flat is None else compare(entry, flat),
                "peak_memory_bytes": entry.memory,
                "wire_bytes": wire_bytes,
                "wire_ms": wire,
                "compute_ms": compute,
                "bound_ms": bound,
                "to_bound": step / bound if step and bound else None,
                "predicted_ms": predicted,
                "prediction_error": predicted / step - 1 if predicted and step else None,
                "plans": entry.plans,
                "loss_first": entry.losses[0] if entry.losses else None,
                "loss_last": final_loss(entry.losses, last),
                "loss_dense": final_loss(dense, last),
                "losses": entry.losses,
                "warm_up": entry.warm_up,
                "turns": entry.turns,
            }
        )
    return made


def common_steps(entries: Sequence[Entry]) -> int:
    """The last step for which all contestants that did not crash have a loss."""
    return min((len(entry.losses) for entry in entries if entry.error is None), default=0)


def final_loss(losses: Sequence[float], last: int) -> float | None:
    """The mean loss of the few steps before `last`, a step that all contestants have reached."""
    seen = losses[max(0, last - _LAST) : last]
    return sum(seen) / len(seen) if seen else None


def pictured(made: Sequence[Mapping[str, Any]]) -> tuple[str | None, str | None]:
    """The two timelines to show: the fastest rival, and our fastest that sends at least 90% of its bytes.

    With the same bytes, the difference comes from the schedule and not from the codec.
    """
    timed = [row for row in made if row["step_ms"] is not None and row["status"] == "ok"]
    rival = min((row for row in timed if row["kind"] == "rival"), key=lambda row: row["step_ms"], default=None)
    ours = [row for row in timed if row["kind"] == "ours"]
    if rival is not None and rival["wire_bytes"]:
        ours = [row for row in ours if (row["wire_bytes"] or 0) >= 0.9 * rival["wire_bytes"]] or ours
    mine = min(ours, key=lambda row: row["step_ms"], default=None)
    return (rival["strategy"] if rival else None), (mine["strategy"] if mine else None)


def last_two_steps(steps: Sequence[Sequence[int]], spans: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The last two whole steps of a turn, from start to start, in milliseconds from the first one's start."""
    starts = [start for start, _ in steps][-3:]
    if len(starts) < 3:
        return {"marks": [], "spans": []}
    zero, last = starts[0], starts[-1]
    seen = [
        [lane, name, unit, round((max(start, zero) - zero) / 1e6, 4), round((min(end, last) - zero) / 1e6, 4)]
        for lane, name, unit, _, start, end in spans
        if end > zero and start < last and lane != "step"
    ]
    return {"marks": [(start - zero) / 1e6 for start in starts], "spans": sorted(seen, key=lambda s: s[3])}
