"""Scaling of a strategy over world sizes, with start-up separated from steady state.

There are two speed-ups, with and without start-up, because they can disagree: in one training the later epochs scaled
almost perfectly, but the first epoch took 45 times as long, so the whole run got slower with every GPU.
"""

from dataclasses import dataclass

from syncline import stats
from syncline.report.compare import efficiency, labels, speedup, steady, step_median, workers
from syncline.results.file import finite, numbers, ok
from syncline.results.schema import Results, Run

DOMINATES = 0.5
"""If start-up takes more than this share of the run, the report says so."""


@dataclass(frozen=True)
class StartUp:
    """Time before steady state, in ms. `parts` in order: launch, build, rendezvous, excess of the first step."""

    label: str
    parts: tuple[tuple[str, float], ...]
    steady_ms: float
    first_step_ms: float | None
    step_ms: float | None
    first_epoch_s: float | None
    later_epoch_s: float | None

    @property
    def total_ms(self) -> float:
        """All of start-up."""
        return sum(ms for _, ms in self.parts)

    @property
    def share(self) -> float:
        """Start-up as a share of start-up plus steady state."""
        whole = self.total_ms + self.steady_ms
        return self.total_ms / whole if whole > 0 else 0.0

    @property
    def largest(self) -> tuple[str, float] | None:
        """The part that costs most."""
        return max(self.parts, key=lambda part: part[1], default=None)


@dataclass(frozen=True)
class Point:
    """One world size of a strategy. `whole_*` counts start-up, the others do not."""

    world_size: int
    run: Run
    step_ms: float | None
    first_epoch_s: float | None
    later_epoch_s: float | None
    samples_per_s: float | None
    speedup: float | None
    efficiency: float | None
    whole_s: float | None
    whole_speedup: float | None


@dataclass(frozen=True)
class Curve:
    """A strategy's points by world size; the first one is the baseline."""

    strategy: str
    points: tuple[Point, ...]


def start_up(run: Run, *, label: str | None = None) -> StartUp:
    """Start-up and steady state of one run."""
    parts = [(str(k), ms) for k, v in run.get("startup_ms", {}).items() if (ms := finite(v)) is not None and ms > 0]
    first, middle = finite(run.get("first_step_ms")), step_median(run)
    if first is not None and middle is not None and first > middle:
        parts.append(("first step", first - middle))
    epochs = numbers([e.get("train_s") for e in run.get("epochs", [])])
    return StartUp(
        label=label or run["strategy"],
        parts=tuple(parts),
        steady_ms=sum(steady(run)) + (middle or 0.0),
        first_step_ms=first,
        step_ms=middle,
        first_epoch_s=epochs[0] if epochs else None,
        later_epoch_s=stats.median(epochs[1:]) if len(epochs) > 1 else None,
    )


def start_ups(results: Results) -> list[StartUp]:
    """Start-up of every run that has a figure for it."""
    runs = results["runs"]
    found = [start_up(r, label=n) for r, n in zip(runs, labels(runs), strict=True)]
    return [s for s in found if s.parts or s.first_step_ms is not None]


def curves(results: Results) -> list[Curve]:
    """Strategies that finished at two or more world sizes, in the order of the file."""
    families: dict[str, dict[int, Run]] = {}
    for run in results["runs"]:
        if ok(run):
            families.setdefault(run["strategy"], {})[workers(run)] = run
    return [
        Curve(name, tuple(_point(sizes[size], sizes[min(sizes)]) for size in sorted(sizes)))
        for name, sizes in families.items()
        if len(sizes) > 1
    ]


def _point(run: Run, base: Run) -> Point:
    start = start_up(run)
    whole, whole_base = _whole_s(run, start), _whole_s(base, start_up(base))
    return Point(
        world_size=workers(run),
        run=run,
        step_ms=start.step_ms,
        first_epoch_s=start.first_epoch_s,
        later_epoch_s=start.later_epoch_s,
        samples_per_s=finite(run.get("samples_per_s")),
        speedup=speedup(run, base),
        efficiency=efficiency(run, base),
        whole_s=whole,
        whole_speedup=whole_base / whole if whole and whole_base else None,
    )


def _whole_s(run: Run, start: StartUp) -> float | None:
    """Start-up plus all training: the epochs if they were timed, else the steps. Without testing."""
    epochs = numbers([e.get("train_s") for e in run.get("epochs", [])])
    if epochs:
        outside = sum(ms for name, ms in start.parts if name != "first step")  # the first epoch includes it
        return sum(epochs) + outside / 1000
    return (start.total_ms + start.steady_ms) / 1000 or None
