"""What causes are judged by, and what they find."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.stats import mean_or_zero, winsorized_mean
from syncline.trace.analysis.cpu_load import Load
from syncline.trace.analysis.exchanges import Late
from syncline.trace.analysis.limits import Bound
from syncline.trace.analysis.network import Wire
from syncline.trace.analysis.startup import StartUp


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence, and what a step would lose without it; None where that cannot be said."""

    kind: str
    sentence: str
    recoverable_ms: float | None = None
    doubt_ms: float = 0.0
    """What is below this may be chance."""
    leads: bool = False
    """Whether others may be its consequences: it comes before those that cost up to twice as much."""

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {"kind": self.kind, "sentence": self.sentence, "recoverable_ms": self.recoverable_ms}


@dataclass(frozen=True)
class Facts:
    """What causes are judged by; series are over the steady steps."""

    ranks: tuple[int, ...]
    steps: int
    all_steps: int
    step_ms: float
    """The usual step."""
    whole_ms: float
    """All steps of the trace, start-up too."""
    phases: dict[str, dict[int, tuple[float, ...]]]
    """By phase and rank: ms in each step."""
    late: tuple[Late, ...]
    wire: Wire | None
    bound: Bound
    startup: StartUp
    loads: tuple[Load, ...] = ()
    on_gpu: bool = False
    communication: float | None = None
    """The share of transfers' time that compute hides."""
    moving: frozenset[int] = frozenset()
    """Ranks that have a transfer; of others a Horovod timeline has only when they came."""
    behind_data: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """By rank: ms of each step in which loading data hides an exchange that nothing else hides."""
    waits_told: bool = True
    """Whether waits for a late rank are told from transfers."""

    def ms(self, phase: str) -> float:
        """A phase's ms a step, the mean over ranks; of exchanges, over those that have any."""
        return mean_or_zero([winsorized_mean(series) for series in self._of(phase)])

    def series(self, phase: str) -> list[float]:
        """A phase's ms in each step, the mean over ranks; of exchanges, over those that have any."""
        return [mean_or_zero(column) for column in zip(*self._of(phase), strict=True)]

    def _of(self, phase: str) -> list[tuple[float, ...]]:
        some = phase == "exposed_exchange" and self.moving
        return [series for rank, series in self.phases[phase].items() if not some or rank in self.moving]

    def share(self, ms: float) -> str:
        """Of the step, in percent."""
        return f"{ms / self.step_ms:.0%}" if self.step_ms else "-"
