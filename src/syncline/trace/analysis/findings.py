"""Facts and findings: the input and the output of the functions that look for a cause of slowness."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from syncline.stats import mean_or_zero
from syncline.trace.analysis.between_steps import LongSteps
from syncline.trace.analysis.breakdown import Bound
from syncline.trace.analysis.cpu_load import HostLoad
from syncline.trace.analysis.gpu_use import GpuUse
from syncline.trace.analysis.late_ranks import LateRanks
from syncline.trace.analysis.network import NetworkUse
from syncline.trace.analysis.startup import StartUp

_WORDS = {
    "exposed_encode": "encoding",
    "exposed_exchange": "transfers",
    "data": "data loading",
    "wait": "waits",
    "between": "the time between steps",
    "other": "work outside the recorded lanes",
    "replan": "planning",
    "probe": "measuring",
}


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence. `recoverable_ms`: what fixing it would save per step; None where that is unknown."""

    kind: str
    sentence: str
    recoverable_ms: float | None = None
    doubt_ms: float = 0.0
    """An effect below this may be chance."""
    leads: bool = False
    """Whether other findings may be consequences of this one: it comes before those that cost up to twice as much."""

    @property
    def gain(self) -> float:
        """`recoverable_ms`, or 0 where it is unknown."""
        return self.recoverable_ms or 0.0

    def as_json(self) -> dict[str, object]:
        """As in the analysis."""
        return {"kind": self.kind, "sentence": self.sentence, "recoverable_ms": self.recoverable_ms}


@dataclass(frozen=True)
class Facts:
    """The figures that causes are judged by; series are over the usual steps."""

    ranks: tuple[int, ...]
    steps: int
    all_steps: int
    step_ms: float
    """The mean of the usual steps."""
    whole_ms: float
    """All steps of the trace, with start-up."""
    phases: dict[str, dict[int, tuple[float, ...]]]
    """By phase and rank: ms in each step."""
    late: tuple[LateRanks, ...]
    network: NetworkUse | None
    bound: Bound
    startup: StartUp
    loads: tuple[HostLoad, ...] = ()
    on_gpu: bool = False
    communication: float | None = None
    """The share of the transfers' time that compute hides."""
    transferring: frozenset[int] = frozenset()
    """Ranks that have transfers; a Horovod timeline has only the joins of the others."""
    hidden_by: Mapping[str, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)
    """By phase (data, between) and rank: ms of each step in which only this phase hides an exchange."""
    loader_timed: bool = True
    """Whether data loading was recorded; else the phase `data` has only copies of input to the GPU, or nothing."""
    known_between: Mapping[str, float] = field(default_factory=dict)
    """Ms per step of known work between steps (checkpoint, logging), the mean over ranks."""
    long: LongSteps | None = None
    waits_known: bool = True
    """Whether waits for a late rank are separated from transfers."""
    issuing_ms: float = 0.0
    """Ms per step, the mean over ranks, in which the training thread packs, starts or unpacks messages."""
    transfer_waits: tuple[float, ...] = ()
    """Ms of each step, the mean over ranks, of waits because a transfer ended later on the rank that is waited for."""
    delayed_transfers: tuple[float, ...] = ()
    """Ms of each step, the mean over ranks, of transfers that are visible only because a rank joined late."""
    pipeline_waits: tuple[float, ...] = ()
    """Ms of each step, the mean over ranks, of visible waits for messages from one rank to another."""
    straggler: LateRanks | None = None
    """The ranks that most waits are for, one or several together."""
    gpu: GpuUse | None = None
    """How the GPUs are used; None if the trace shows no kernels. With it, the phase `other` is idle time."""

    def ms(self, phase: str) -> float:
        """A phase's ms per step, the mean over ranks; for exchanges, over the ranks that have transfers."""
        return mean_or_zero(self.series(phase))

    def series(self, phase: str) -> list[float]:
        """A phase's ms in each step, the mean over the same ranks."""
        return [mean_or_zero(column) for column in zip(*self._of(phase), strict=True)]

    def transfers(self) -> list[float]:
        """Ms of each step of visible transfers, without those that are visible only because a rank joined late."""
        pairs = zip_longest(self.series("exposed_exchange"), self.delayed_transfers, fillvalue=0.0)
        return [max(0.0, shown - late) for shown, late in pairs]

    def _of(self, phase: str) -> list[tuple[float, ...]]:
        some = phase == "exposed_exchange" and self.transferring
        return [series for rank, series in self.phases[phase].items() if not some or rank in self.transferring]

    def words(self, phase: str) -> str:
        """A phase as sentences name it. The GPU's kernels are all recorded, so its other time is idle."""
        idle = phase == "other" and self.gpu is not None
        return "idle time of the GPU" if idle else _WORDS.get(phase, phase)

    def share(self, ms: float) -> str:
        """This time as a percentage of the step."""
        return f"{ms / self.step_ms:.0%}" if self.step_ms else "-"
