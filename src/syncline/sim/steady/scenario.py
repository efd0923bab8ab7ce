"""Input and output of the simulator: layers of a model, jobs of a plan and their costs; step time and waits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from syncline.errors import UsageError
from syncline.sim.network import Transfer
from syncline.trace.span import Span


@dataclass(frozen=True, slots=True)
class Layer:
    """Compute between two points where the engine can act, in seconds. Layers are listed in forward order."""

    name: str
    forward: float
    backward: float
    needs: tuple[int, ...] = ()
    """Units whose parameters are first read at the start of this layer's forward."""


@dataclass(frozen=True, slots=True)
class Job:
    """One launch, a part of a unit: encode, its rounds with codec work between them, decode."""

    unit: int
    ready: int
    """The layer whose backward completes the gradient."""
    encode: float
    rounds: tuple[Transfer, ...]
    between: float = 0.0
    """Codec work after each round but the last."""
    decode: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """Steady-state training of one rank; all ranks do the same at the same time. Jobs are listed in launch order."""

    layers: tuple[Layer, ...]
    jobs: tuple[Job, ...]
    update: tuple[float, ...]
    """Update seconds of each unit, after the decode of its last job and after the backward pass."""
    data: float = 0.0
    """On the training thread, at the start of a step."""
    lanes: int = 4
    """Launches in flight at once: the engine's workers or streams."""
    rival: bool = False
    """Simulate DDP: all updates after the last exchange, on the training thread, before the next step."""
    contention: float = 0.0
    """Seconds of other compute that one second of concurrent codec or update work costs, 0 to 1."""
    drag: float = 0.0
    """Seconds of compute that one second of network traffic costs: sending and receiving use cores too."""
    host: float = 0.0
    """Host seconds to issue a step's work to a GPU. The host runs ahead of the GPU, so a step takes at least this."""
    pipelined: bool = False
    """A communicator's next latency overlaps with its current transfer."""

    def __post_init__(self) -> None:
        _check(self)

    def with_(self, **changes: Any) -> "Scenario":
        """A copy with some fields changed."""
        return replace(self, **changes)

    def ordered(self, order: Sequence[int]) -> "Scenario":
        """A copy with the jobs in this order of their current positions."""
        if sorted(order) != list(range(len(self.jobs))):
            raise UsageError(f"an order names each of the {len(self.jobs)} jobs once")
        return replace(self, jobs=tuple(self.jobs[i] for i in order))

    @property
    def compute(self) -> float:
        """Seconds of the training thread in a step without communication."""
        return self.data + sum(layer.forward + layer.backward for layer in self.layers)

    @property
    def wire(self) -> float:
        """Seconds that a step's transfers take on the network."""
        return sum(one.wire for job in self.jobs for one in job.rounds)

    @property
    def serial(self) -> float:
        """Seconds of a step without any overlap."""
        codec = sum(job.encode + job.decode + job.between * max(0, len(job.rounds) - 1) for job in self.jobs)
        latency = sum(one.latency for job in self.jobs for one in job.rounds)
        return self.compute + self.wire + latency + codec + sum(self.update)


@dataclass(frozen=True, slots=True)
class Wait:
    """The training thread waited before a layer's forward; `unit` finished last. `layer` is -1 at a barrier."""

    layer: int
    unit: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The simulator's result for a step, in seconds."""

    step: float
    compute: float
    wire: float
    waits: tuple[Wait, ...] = ()
    """Waits of the training thread, in order of time. Without contention, and unless the host is the bound, they sum
    to `exposed`."""
    spans: list[Span] = field(default_factory=list)
    host: float = 0.0
    """Host seconds to issue the step to a GPU."""

    @property
    def bound(self) -> float:
        """Lower bound for these launches: max(compute, wire). A slow host may make it unreachable."""
        return max(self.compute, self.wire)

    @property
    def exposed(self) -> float:
        """Seconds that communication, codecs, updates and a slow host add to a step of compute alone."""
        return self.step - self.compute


def _check(s: Scenario) -> None:
    if s.lanes < 1 or not 0 <= s.contention <= 1 or not s.drag >= 0:
        raise UsageError(
            f"lanes={s.lanes}, contention={s.contention}, drag={s.drag}: use 1 or more, 0 to 1, and 0 or more"
        )
    if not s.layers:
        raise UsageError("a scenario needs a layer")
    units, layers = len(s.update), len(s.layers)
    for job in s.jobs:
        if not (0 <= job.unit < units and 0 <= job.ready < layers):
            raise UsageError(
                f"a job of unit {job.unit}, ready after layer {job.ready}: there are {units} units and {layers} layers"
            )
    needed = Counter(unit for layer in s.layers for unit in layer.needs)
    if odd := [unit for unit, times in needed.items() if times > 1 or not 0 <= unit < units]:
        raise UsageError(f"unit {min(odd)} is needed twice or has no update time: a unit is first touched once")
    least = min(_times(s))
    if not least >= 0:
        raise UsageError(f"a time of {least} s: times are 0 or more")


def _times(s: Scenario) -> Iterable[float]:
    yield from (s.data, s.host, *s.update)
    for layer in s.layers:
        yield layer.forward
        yield layer.backward
    for job in s.jobs:
        yield min(job.encode, job.between, job.decode)
        for one in job.rounds:
            yield min(one.latency, one.wire)
