"""Two traces compared, phase by phase: what a step takes more or less, and how sure that is. Pure.

Figures are of steady steps, each the mean over ranks, without the slowest and the fastest tenth of the steps, so that a
stray step hides nothing. What only every tenth step does is seen in a second mean, which leaves out stray ones alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from syncline.errors import UsageError
from syncline.stats import median_mean_p95
from syncline.trace.analysis.analysis import Analysis, analyze
from syncline.trace.analysis.bootstrap import STRAY, TRIM, draws, interval, trimmed
from syncline.trace.analysis.steps import prepare
from syncline.trace.analysis.units import UnitRow
from syncline.trace.span import PHASES, Span

FORMAT = "syncline diff 1"
CONFIDENCE = 0.95
FEWEST = 8
"""Steady steps of each trace below which no interval is given."""
THRESHOLD = 0.05
_UNITS = 8
_SEEDS = 20_011, 20_021


@dataclass(frozen=True)
class Side:
    """One of the two: its figures, and the table of its steady steps (ms: the step, then its phases)."""

    told: Analysis
    source: str
    steps: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]
    bytes: float

    def as_json(self) -> dict[str, Any]:
        """What it is and what was taken of it."""
        told = self.told
        return {
            "source": self.source,
            "strategy": told.strategy,
            "world_size": told.world_size,
            "steps": {"first": self.steps[0], "last": self.steps[-1], "count": len(self.steps)},
            "step_ms": median_mean_p95([row[0] for row in self.rows]),
            "overlap": {"communication": told.communication, "compression": told.compression},
            "bytes_per_step": self.bytes,
            "notes": list(told.notes),
        }


@dataclass(frozen=True)
class Change:
    """A step or a phase in A and in B, in ms; without an interval where there are too few steps."""

    a_ms: float
    b_ms: float
    interval_ms: tuple[float, float] | None

    @property
    def difference_ms(self) -> float:
        """What B takes more."""
        return self.b_ms - self.a_ms

    @property
    def ratio(self) -> float | None:
        """B over A."""
        return self.b_ms / self.a_ms if self.a_ms > 0 else None

    @property
    def significant(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval_ms is not None and not self.interval_ms[0] <= 0 <= self.interval_ms[1]

    def as_json(self) -> dict[str, Any]:
        """As in `Diff.as_json`."""
        between = None if self.interval_ms is None else list(self.interval_ms)
        return {**asdict(self), "interval_ms": between, "difference_ms": self.difference_ms, "ratio": self.ratio,
                "significant": self.significant}  # fmt: skip


@dataclass(frozen=True)
class Diff:
    """What came of it; `kind` is slower, faster, same or unknown, `exit_code` what a gate should return."""

    a: Side
    b: Side
    threshold: float
    step: Change
    slow_steps: Change
    """The step once more, with slow ones counted."""
    phases: Mapping[str, Change]
    units: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def enough(self) -> bool:
        """Whether both have steps enough to tell."""
        return self.step.interval_ms is not None

    @property
    def kind(self) -> str:
        """Of the step: a difference counts when it is significant and larger than the threshold."""
        if not self.enough or self.step.ratio is None:
            return "unknown"
        if self._counts(self.step) > 0 or self._counts(self.slow_steps) > 0:
            return "slower"
        return "faster" if self._counts(self.step) < 0 else "same"

    @property
    def exit_code(self) -> int:
        """0 not slower, 1 slower, 2 not to be told."""
        return {"slower": 1, "unknown": 2}.get(self.kind, 0)

    @property
    def sentence(self) -> str:
        """The outcome, with what it is made of."""
        step = self.step
        if not self.enough:
            few = [f"{name} has {len(side.steps)}" for name, side in (("A", self.a), ("B", self.b))
                   if len(side.steps) < FEWEST]  # fmt: skip
            return f"too few steady steps to tell: {' and '.join(few)}, {FEWEST} are needed: trace more steps"
        if step.ratio is None:
            return "the steps of A take no time, so nothing can be compared with them: record A again"
        assert step.interval_ms is not None
        low, high = step.interval_ms
        size = f"{step.difference_ms:+.2f} ms a step ({low:+.2f} to {high:+.2f}), {step.ratio - 1:+.1%}"
        if self.kind == "slower" and self._counts(step) <= 0:
            return _slow_steps(self.slow_steps, step)
        if not step.significant:
            return f"no difference that is more than chance: {size}"
        word = "slower" if step.difference_ms > 0 else "faster"
        if self.kind == "same":
            return f"B is {word}, by no more than {self.threshold:.0%}: {size}"
        most = max(self.phases, key=lambda phase: self.phases[phase].difference_ms * (1 if word == "slower" else -1))
        return f"B is {word}: {size}; most of it in {most} ({self.phases[most].difference_ms:+.2f} ms)"

    def as_json(self) -> dict[str, Any]:
        """Stable: fields are added, never renamed."""
        return {
            "format": FORMAT,
            "verdict": {"kind": self.kind, "sentence": self.sentence, "exit_code": self.exit_code},
            "confidence": CONFIDENCE,
            "threshold": self.threshold,
            "a": self.a.as_json(),
            "b": self.b.as_json(),
            "step": self.step.as_json(),
            "slow_steps": self.slow_steps.as_json(),
            "phases": {phase: change.as_json() for phase, change in self.phases.items()},
            "units": list(self.units),
            "notes": list(self.notes),
        }

    def _counts(self, change: Change) -> int:
        """1 where it is slower, more than chance and the threshold allow; -1 where faster."""
        ratio = change.ratio
        if ratio is None or not change.significant or abs(ratio - 1) <= self.threshold:
            return 0
        return 1 if ratio > 1 else -1


def side(
    spans: Iterable[Span], *, metadata: Mapping[str, Any] | None = None, notes: Sequence[str] = (), source: str = ""
) -> Side:
    """A trace made ready: its analysis, and its steady steps."""
    spans = list(spans)
    told = analyze(spans, metadata=metadata, notes=notes)
    trace = prepare(spans)
    steady = tuple(step for step in trace.steps if step >= told.steady_first)
    count = len(trace.ranks)
    rows = []
    for step, ms in zip(steady, trace.series(steady), strict=True):
        parts = [trace.parts[rank][step] for rank in trace.ranks]
        rows.append((ms, *(sum(part[phase] for part in parts) / count / 1e6 for phase in PHASES)))
    sent = sum(s.bytes for s in spans if s.lane == "exchange" and s.step in set(steady) and s.rank in trace.ranks)
    return Side(told, source, steady, tuple(rows), sent / count / max(1, len(steady)))


def diff(a: Side, b: Side, *, threshold: float = THRESHOLD) -> Diff:
    """B against A; a slower B counts from `threshold` (a share of A's step) on."""
    if not threshold >= 0:
        raise UsageError(f"a threshold of {threshold}: use 0 or more, such as 5%")
    changes = _changes(a.rows, b.rows, TRIM)
    (slow,) = _changes([row[:1] for row in a.rows], [row[:1] for row in b.rows], STRAY)
    phases = dict(zip(PHASES, changes[1:], strict=True))
    return Diff(a, b, threshold, changes[0], slow, phases, _units(a.told.units, b.told.units), _notes(a, b))


def _changes(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], trim: float) -> list[Change]:
    """Of each column."""
    before, after = trimmed(a, trim=trim), trimmed(b, trim=trim)
    between: list[tuple[float, float] | None] = [None] * len(before)
    if min(len(a), len(b)) >= FEWEST:
        drawn = draws(b, seed=_SEEDS[1], trim=trim) - draws(a, seed=_SEEDS[0], trim=trim)
        between = [interval(drawn[:, column], confidence=CONFIDENCE) for column in range(drawn.shape[1])]
    return [Change(*three) for three in zip(before, after, between, strict=True)]


def _slow_steps(all_steps: Change, step: Change) -> str:
    """The sentence where most steps are as before."""
    assert all_steps.interval_ms is not None
    assert all_steps.ratio is not None
    low, high = all_steps.interval_ms
    return (
        f"B is slower in some steps: with them {all_steps.difference_ms:+.2f} ms a step ({low:+.2f} to {high:+.2f}),"
        f" {all_steps.ratio - 1:+.1%}; without the slowest tenth {step.difference_ms:+.2f} ms"
    )


def _units(a: Sequence[UnitRow], b: Sequence[UnitRow]) -> tuple[dict[str, Any], ...]:
    """The units that changed most: by what of them is exposed, then by their transfers."""
    left, right = ({(row.name, row.unit): row for row in rows} for rows in (a, b))
    rows = []
    for key in {**left, **right}:
        one, other = left.get(key), right.get(key)
        row: dict[str, Any] = {"name": key[0], "unit": key[1]}
        for field in ("bytes", "wait_ms", "transfer_ms", "exposed_ms"):
            row[f"a_{field}"] = None if one is None else getattr(one, field)
            row[f"b_{field}"] = None if other is None else getattr(other, field)
        rows.append(row)

    def moved(row: dict[str, Any]) -> tuple[float, ...]:
        return tuple(-abs((row[f"b_{f}"] or 0.0) - (row[f"a_{f}"] or 0.0)) for f in ("exposed_ms", "transfer_ms"))

    return tuple(sorted(rows, key=moved)[:_UNITS])


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    notes = []
    for what, one, other in (
        ("strategies", a.told.strategy, b.told.strategy),
        ("numbers of ranks", a.told.world_size, b.told.world_size),
    ):
        if one != other:
            notes.append(f"the {what} differ: A has {one or 'an unknown one'}, B has {other or 'an unknown one'}")
    names = [{(row.name, row.unit) for row in s.told.units} for s in (a, b)]
    if all(names) and not names[0] & names[1]:
        notes.append("A and B have no unit in common")
    return tuple(notes)
