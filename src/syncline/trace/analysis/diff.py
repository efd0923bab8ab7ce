"""Comparison of two traces by phase and by operator: the difference per step and its confidence interval.

Figures are of steady steps, the mean over ranks, without the slowest and the fastest tenth of the steps, so that a
single odd step hides nothing. A second mean leaves out only the slowest few, to show what happens in every tenth step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from syncline.errors import UsageError
from syncline.stats import mean, median_mean_p95
from syncline.trace.analysis.analyze import Analysis, analyze
from syncline.trace.analysis.bootstrap import STRAY, TRIM, draws, interval, trimmed
from syncline.trace.analysis.operators import operator_series
from syncline.trace.analysis.steps import prepare
from syncline.trace.analysis.units import UnitRow
from syncline.trace.merge.merge_ranks import Trace
from syncline.trace.span import PHASES

FORMAT = "syncline diff 1"
CONFIDENCE = 0.95
FEWEST = 8
"""The least number of steady steps of each trace for a confidence interval."""
THRESHOLD = 0.05
_UNITS = _OPERATORS = 8
_NAMED = 0.5  # of the step's difference: an operator with this much is named in the sentence
_SEEDS = 20_011, 20_021


@dataclass(frozen=True)
class Side:
    """One of the two traces: its analysis, and the table of its steady steps (ms: the step, then its phases)."""

    analysis: Analysis
    source: str
    steps: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]
    bytes: float
    operators: Mapping[str, Sequence[float]]
    """By operator: its ms in each of the steps."""

    def as_json(self) -> dict[str, Any]:
        """As in `Diff.as_json`."""
        analysis = self.analysis
        return {
            "source": self.source,
            "strategy": analysis.strategy,
            "world_size": analysis.world_size,
            "steps": {"first": self.steps[0], "last": self.steps[-1], "count": len(self.steps)},
            "step_ms": median_mean_p95([row[0] for row in self.rows]),
            "overlap": {"communication": analysis.communication, "compression": analysis.compression},
            "bytes_per_step": self.bytes,
            "notes": list(analysis.notes),
        }


@dataclass(frozen=True)
class Change:
    """A step or a phase in A and in B, in ms; without an interval if there are too few steps."""

    a_ms: float
    b_ms: float
    interval_ms: tuple[float, float] | None

    @property
    def difference_ms(self) -> float:
        """B minus A."""
        return self.b_ms - self.a_ms

    @property
    def ratio(self) -> float | None:
        """B / A."""
        return self.b_ms / self.a_ms if self.a_ms > 0 else None

    @property
    def significant(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.interval_ms is not None and not self.interval_ms[0] <= 0 <= self.interval_ms[1]

    def __str__(self) -> str:
        between = "" if self.interval_ms is None else " ({:+.2f} to {:+.2f})".format(*self.interval_ms)
        share = "" if self.ratio is None else f", {self.ratio - 1:+.1%}"
        return f"{self.difference_ms:+.2f} ms per step{between}{share}"

    def as_json(self) -> dict[str, Any]:
        """As in `Diff.as_json`."""
        more = {name: getattr(self, name) for name in ("difference_ms", "ratio", "significant")}
        return {**asdict(self), "interval_ms": self.interval_ms and list(self.interval_ms), **more}


@dataclass(frozen=True)
class Diff:
    """The result: `kind` is slower, faster, same or unknown; `exit_code` is for a CI gate."""

    a: Side
    b: Side
    threshold: float
    step: Change
    slow_steps: Change
    """The step again, in a mean that includes slow steps."""
    phases: Mapping[str, Change]
    operators: Mapping[str, Change]
    """Those that changed most."""
    units: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def enough(self) -> bool:
        """Whether both traces have enough steps."""
        return self.step.interval_ms is not None

    @property
    def kind(self) -> str:
        """The verdict on the step: a difference counts if it is significant and larger than the threshold."""
        if not self.enough or self.step.ratio is None:
            return "unknown"
        if self._counts(self.step) > 0 or self._counts(self.slow_steps) > 0:
            return "slower"
        return "faster" if self._counts(self.step) < 0 else "same"

    @property
    def exit_code(self) -> int:
        """0 not slower, 1 slower, 2 unknown."""
        return {"slower": 1, "unknown": 2}.get(self.kind, 0)

    @property
    def sentence(self) -> str:
        """The outcome in one sentence, with its largest part."""
        step = self.step
        if not self.enough:
            sides = {"A": self.a, "B": self.b}
            few = [f"{name} has {len(side.steps)}" for name, side in sides.items() if len(side.steps) < FEWEST]
            return f"too few steady steps for a verdict: {' and '.join(few)}, {FEWEST} are needed: trace more steps"
        if step.ratio is None:
            return "the steps of A take no time, so nothing can be compared with them: record A again"
        if self.kind == "slower" and self._counts(step) <= 0:
            without = f"without the slowest tenth {step.difference_ms:+.2f} ms"
            return f"B is slower in some steps: with them {self.slow_steps}; {without}"
        if not step.significant:
            return f"no significant difference: {step}"
        word = "slower" if step.difference_ms > 0 else "faster"
        if self.kind == "same":
            return f"B is {word}, by no more than {self.threshold:.0%}: {step}"
        most = max(self.phases, key=lambda phase: self.phases[phase].difference_ms * (1 if word == "slower" else -1))
        text = f"B is {word}: {step}; most of it in {most} ({self.phases[most].difference_ms:+.2f} ms)"
        name, change = next(iter(self.operators.items()), ("", None))
        if change is None or name == most or not change.significant:
            return text
        if abs(change.difference_ms) < _NAMED * abs(step.difference_ms):
            return text
        return f"{text}, and by operator in {name} ({change.difference_ms:+.2f} ms)"

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
            "operators": {name: change.as_json() for name, change in self.operators.items()},
            "units": list(self.units),
            "notes": list(self.notes),
        }

    def _counts(self, change: Change) -> int:
        """1 if slower, -1 if faster, 0 if the change is not significant or within the threshold."""
        ratio = change.ratio
        if ratio is None or not change.significant or abs(ratio - 1) <= self.threshold:
            return 0
        return 1 if ratio > 1 else -1


def side(trace: Trace, *, source: str = "") -> Side:
    """Prepare one trace for the comparison: its analysis, and its steady steps."""
    analysis = analyze(trace)
    prepared = prepare(trace)
    steady = tuple(step for step in prepared.steps if step >= analysis.steady_first)
    columns = [prepared.series(steady)]
    for phase in PHASES:
        of_ranks = [prepared.phase(phase, rank, steady) for rank in prepared.ranks]
        columns.append([mean(values) for values in zip(*of_ranks, strict=True)])
    sent = analysis.network.bytes if analysis.network is not None else 0.0
    operators = operator_series(prepared, steady, trace.metadata)
    return Side(analysis, source, steady, tuple(zip(*columns, strict=True)), sent, operators)


def diff(a: Side, b: Side, *, threshold: float = THRESHOLD) -> Diff:
    """Compare B with A; `threshold` is the least change that counts, as a share of A's step."""
    if not threshold >= 0:
        raise UsageError(f"a threshold of {threshold}: use 0 or more, such as 5%")
    changes = _changes(a.rows, b.rows, TRIM)
    (slow,) = _changes([row[:1] for row in a.rows], [row[:1] for row in b.rows], STRAY)
    phases = dict(zip(PHASES, changes[1:], strict=True))
    units = _units(a.analysis.units, b.analysis.units)
    return Diff(a, b, threshold, changes[0], slow, phases, _operators(a, b), units, _notes(a, b))


def _changes(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], trim: float) -> list[Change]:
    """The change of each column."""
    before, after = trimmed(a, trim=trim), trimmed(b, trim=trim)
    between: list[tuple[float, float] | None] = [None] * len(before)
    if min(len(a), len(b)) >= FEWEST:
        drawn = draws(b, seed=_SEEDS[1], trim=trim) - draws(a, seed=_SEEDS[0], trim=trim)
        between = [interval(drawn[:, column], confidence=CONFIDENCE) for column in range(drawn.shape[1])]
    return [Change(*three) for three in zip(before, after, between, strict=True)]


def _operators(a: Side, b: Side) -> dict[str, Change]:
    """The operators that changed most, the largest change first; one that a side lacks takes no time there."""
    names = sorted({*a.operators, *b.operators})
    if not a.rows or not b.rows or not names:
        return {}

    def table(one: Side, chosen: Sequence[str]) -> list[tuple[float, ...]]:
        missing = [0.0] * len(one.rows)
        columns = [[row[0] for row in one.rows], *(one.operators.get(name, missing) for name in chosen)]
        return list(zip(*columns, strict=True))

    before, after = (trimmed(table(one, names), trim=TRIM)[1:] for one in (a, b))
    moved = {name: abs(y - x) for name, x, y in zip(names, before, after, strict=True) if x or y}
    chosen = sorted(moved, key=lambda name: -moved[name])[:_OPERATORS]
    return dict(zip(chosen, _changes(table(a, chosen), table(b, chosen), TRIM)[1:], strict=True))


def _units(a: Sequence[UnitRow], b: Sequence[UnitRow]) -> tuple[dict[str, Any], ...]:
    """The units that changed most: by exposed time, then by transfer time."""
    sides = {name: {(row.name, row.unit): row for row in rows} for name, rows in (("a", a), ("b", b))}
    rows: list[dict[str, Any]] = []
    for key in {**sides["a"], **sides["b"]}:
        figures = {
            f"{name}_{field}": getattr(of.get(key), field, None)
            for field in ("bytes", "wait_ms", "transfer_ms", "exposed_ms")
            for name, of in sides.items()
        }
        rows.append({"name": key[0], "unit": key[1], **figures})

    def moved(row: dict[str, Any]) -> tuple[float, ...]:
        return tuple(-abs((row[f"b_{f}"] or 0.0) - (row[f"a_{f}"] or 0.0)) for f in ("exposed_ms", "transfer_ms"))

    return tuple(sorted(rows, key=moved)[:_UNITS])


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    notes = []
    for what, one, other in (
        ("strategies", a.analysis.strategy, b.analysis.strategy),
        ("numbers of ranks", a.analysis.world_size, b.analysis.world_size),
    ):
        if one != other:
            notes.append(f"the {what} differ: A has {one or 'an unknown one'}, B has {other or 'an unknown one'}")
    names = [{(row.name, row.unit) for row in s.analysis.units} for s in (a, b)]
    if all(names) and not names[0] & names[1]:
        notes.append("A and B have no unit in common")
    return tuple(notes)
