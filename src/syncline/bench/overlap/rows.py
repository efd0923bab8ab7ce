"""The arithmetic of `bench overlap`: from turns to rows. Pure: no ranks, no files.

A contestant's turn in a round is compared with the others' turns in the same round, so that what the machine does to a
whole round cancels; the median of the rounds' ratios is the figure.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from syncline.spec import Call, parse_one
from syncline.stats import median
from syncline.train.strategies import STRATEGIES, load
from syncline.train.strategies.local import Local
from syncline.train.strategies.syncline import Syncline

_LAST = 5
"""Steps over which a final loss is averaged."""


@dataclass
class Entry:
    """What is known of one contestant so far. A turn has its round, its steady step times, and bytes a step."""

    strategy: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    warm_up: dict[str, Any] | None = None

    @property
    def step_ms(self) -> float | None:
        """The median of the rounds."""
        return median(list(self.by_round.values())) if self.turns else None

    @property
    def by_round(self) -> dict[int, float]:
        """The mean step of each round: what one step waits for another may have been spared, a mean counts both."""
        return {turn["round"]: sum(turn["step_ms"]) / len(turn["step_ms"]) for turn in self.turns}


def steady_ms(steps: Sequence[Sequence[int]], *, lead: int) -> list[float]:
    """Milliseconds from a step's start to the next one's, without the first `lead` steps of a turn.

    Where exchanges reach into the next step, a step by itself says nothing; and the first steps of a turn find the
    network idle, as no later one does. After the last step nothing starts, so it does not count either.

    >>> steady_ms([[0, 4_000_000], [5_000_000, 9_000_000], [12_000_000, 18_000_000]], lead=1)
    [7.0]
    """
    return [(after - before) / 1e6 for (before, _), (after, _) in pairwise(steps)][lead:]


def turn_steps(step_s: float, *, seconds: float, most: int, least: int = 3) -> int:
    """Steps that count in a turn of about so many seconds.

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
    """A rival without its bucket size: of those that differ in nothing else, the fastest is the rival.

    >>> family_of("ddp-powersgd(rank=64, bucket_mb=5)"), family_of("ddp(5)")
    ('ddp-powersgd(rank=64)', 'ddp')
    """
    call = parse_one(strategy)
    named = dict(inspect.signature(STRATEGIES.get(call.name)).bind(*call.args, **call.kwargs).arguments)
    named.pop("bucket_mb", None)
    return str(Call(call.name, kwargs=named))


def rivals(entries: Sequence[Entry]) -> dict[str, Entry]:
    """The fastest of each family; one that crashed stands in only where no other has a time."""
    best: dict[str, Entry] = {}
    for entry in entries:
        if kind_of(entry.strategy) != "rival" or entry.step_ms is None:
            continue
        family = family_of(entry.strategy)
        if family not in best or _order(entry) < _order(best[family]):
            best[family] = entry
    return best


def _order(entry: Entry) -> tuple[bool, float]:
    return entry.error is not None, entry.step_ms or 0.0


def compare(mine: Entry, other: Entry) -> dict[str, Any] | None:
    """How many times as long the other takes: the median over the rounds that both ran, and their range."""
    ours, theirs = mine.by_round, other.by_round
    ratios = [theirs[number] / ours[number] for number in sorted(ours) if number in theirs]
    if not ratios:
        return None
    return {
        "against": other.strategy,
        "median": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "rounds": ratios,
    }


def rows(entries: Sequence[Entry], *, bytes_per_s: float | None) -> list[dict[str, Any]]:
    """A row a contestant. Without a link's rate there is no time on the wire, and the bound is compute alone."""
    best = rivals(entries)
    compute = next((e.step_ms for e in entries if isinstance(load(e.strategy), Local)), None)
    dense = _dense(entries)
    last = common_steps(entries)
    return [_row(entry, best, compute, bytes_per_s, dense, last) for entry in entries]


def common_steps(entries: Sequence[Entry]) -> int:
    """The step up to which all that finished have a loss."""
    return min((len(entry.losses) for entry in entries if entry.error is None), default=0)


def _row(
    entry: Entry,
    best: Mapping[str, Entry],
    compute: float | None,
    bytes_per_s: float | None,
    dense: Entry | None,
    last: int,
) -> dict[str, Any]:
    step, medians = entry.step_ms, list(entry.by_round.values())
    moved = [turn["wire_bytes"] for turn in entry.turns if turn["wire_bytes"] is not None]
    # The least: a turn in which the engine looked whether its link has changed holds that, too.
    wire_bytes = min(moved, default=None)
    wire = wire_bytes / bytes_per_s * 1e3 if wire_bytes is not None and bytes_per_s else None
    known = [ms for ms in (compute, wire) if ms is not None]
    bound = max(known) if compute is not None else None
    predicted = entry.plans[0]["predicted_ms"] if len(entry.plans) == 1 else None
    kind = kind_of(entry.strategy)
    others = best if kind == "ours" else {}
    return {
        "strategy": entry.strategy,
        "kind": kind,
        "family": family_of(entry.strategy) if kind == "rival" else None,
        "best_of_family": any(entry is rival for rival in best.values()),
        "status": "ok" if entry.error is None else "crashed",
        "error": entry.error,
        "step_ms": step,
        "step_ms_low": min(medians, default=None),
        "step_ms_high": max(medians, default=None),
        "times_faster_than": {family: compare(entry, rival) for family, rival in others.items() if medians},
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
        "loss_dense": final_loss(dense.losses, last) if dense is not None else None,
        "losses": entry.losses,
        "warm_up": entry.warm_up,
        "turns": entry.turns,
    }


def final_loss(losses: Sequence[float], last: int) -> float | None:
    """The mean loss of the few steps before `last`: where all are, not where each has come to."""
    seen = losses[max(0, last - _LAST) : last]
    return sum(seen) / len(seen) if seen else None


def _dense(entries: Sequence[Entry]) -> Entry | None:
    """One that sends gradients as they are."""
    exact = [e for e in entries if e.error is None and load(e.strategy).formula == "2(N-1)/N*S"]
    return exact[0] if exact else None


def pictured(made: Sequence[Mapping[str, Any]]) -> tuple[str | None, str | None]:
    """Which two timelines to show: the fastest rival, and our fastest that sends no less than nine tenths of it.

    With the same bytes, what is seen is the schedule and not the codec.
    """
    timed = [row for row in made if row["step_ms"] is not None and row["status"] == "ok"]
    rival = min((row for row in timed if row["kind"] == "rival"), key=lambda row: row["step_ms"], default=None)
    ours = [row for row in timed if row["kind"] == "ours"]
    if rival is not None and rival["wire_bytes"]:
        ours = [row for row in ours if (row["wire_bytes"] or 0) >= 0.9 * rival["wire_bytes"]] or ours
    mine = min(ours, key=lambda row: row["step_ms"], default=None)
    return (rival["strategy"] if rival else None), (mine["strategy"] if mine else None)
