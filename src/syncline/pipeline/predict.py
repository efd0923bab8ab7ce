"""The predicted step of a pipeline: micro-batches in the order of a schedule, then the exchange. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import UsageError
from syncline.pipeline.layout import Layout
from syncline.pipeline.schedule import check_micro_batches
from syncline.sim import Network


@dataclass(frozen=True)
class Time:
    """Seconds of one pass over some rows: a fixed part per call, and a part per row."""

    fixed: float
    per_row: float

    def of(self, rows: float) -> float:
        """Seconds for so many rows."""
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class SublayerTime:
    """Measured times of a sublayer, and the size of its gradients and of its output per row in bytes."""

    forward: Time
    backward: Time
    gradient_bytes: int = 0
    output_bytes_per_row: float = 0.0


@dataclass(frozen=True)
class Wire:
    """How replicas exchange gradients: the exchange, and the bytes it sends per byte of a gradient."""

    exchange: str
    share: float


DENSE = Wire("allreduce", 1.0)


def costs_of(times: Sequence[SublayerTime], *, frozen: int, rows: float) -> list[float]:
    """The cost of each sublayer for the partition: a frozen one has no backward pass."""
    return [t.forward.of(rows) + (t.backward.of(rows) if at >= frozen else 0.0) for at, t in enumerate(times)]


def predict_step(
    times: Sequence[SublayerTime],
    layout: Layout,
    *,
    frozen: int,
    samples: int,
    micro_batches: int,
    network: Network,
    wire: Wire = DENSE,
    cached: float | None = None,
) -> float:
    """Seconds of a step: `samples` of the global batch are divided among replicas and micro-batches.

    `cached`: seconds to read the activations of a sample, in place of the frozen sublayers of the first stage. Without
    stages, gradients are sent while the rest of the backward pass runs.
    """
    rows = samples / layout.shape.replicas / micro_batches
    stages = []
    for number, stage in enumerate(layout.stages):
        read = range(min(stage.stop, frozen)) if cached is not None and number == 0 else range(0)
        forward = sum(times[at].forward.of(rows) for at in stage if at not in read)
        forward += (cached or 0.0) * rows if read else 0.0
        backward = sum(times[at].backward.of(rows) for at in stage if at >= frozen)
        message = (
            network.launch + network.latency + times[stage.stop - 1].output_bytes_per_row * rows / network.bytes_per_s
        )
        stages.append(StageTime(forward, backward, message))
    positions = [layout.position(stage) for stage in range(len(layout.stages))]
    exchange = exchange_seconds(times, layout, frozen=frozen, network=network, wire=wire)
    if layout.shape.stages == 1:
        return micro_batches * stages[0].forward + max(micro_batches * stages[0].backward, exchange)
    ends = layout.frozen_stages(frozen)
    return makespan(stages, positions, micro_batches, schedule=layout.schedule, frozen=ends) + exchange


def exchange_seconds(
    times: Sequence[SublayerTime], layout: Layout, *, frozen: int, network: Network, wire: Wire = DENSE
) -> float:
    """Seconds to average the gradients of the largest position over the replicas."""
    if layout.shape.replicas == 1:
        return 0.0
    sizes = [
        sum(times[at].gradient_bytes for at in layout.sublayers_at(position) if at >= frozen)
        for position in range(layout.shape.stages)
    ]
    size = max(sizes)
    try:
        seconds = network.seconds(wire.exchange, size * wire.share, layout.shape.replicas, plain=size)
    except UsageError:  # no formula, or not for so few replicas
        seconds = network.seconds(DENSE.exchange, size * wire.share, layout.shape.replicas)
    return network.launch + seconds


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage for one micro-batch: both passes, and the message to the next stage."""

    forward: float
    backward: float
    message: float = 0.0


def makespan(
    stages: Sequence[StageTime], positions: Sequence[int], micro_batches: int, *, schedule: str, frozen: int = 0
) -> float:
    """Seconds until all micro-batches have passed forward and backward; the first `frozen` stages have no backward.

    A rank runs whatever is ready, a backward pass first. `gpipe` runs all forward passes first; `1f1b` keeps at most as
    many micro-batches in flight as there are stages behind. Zero-bubble schedules may divide a backward pass in two
    halves, of which only the first is waited for.
    """
    count = len(stages)
    halves = schedule in ("zero-bubble", "zbv")
    free = dict.fromkeys(positions, 0.0)
    done: dict[tuple[str, int, int], float] = {}
    waiting = {("F", s, m) for s in range(count) for m in range(micro_batches)}
    waiting |= {("B", s, m) for s in range(frozen, count) for m in range(micro_batches)}
    if halves:
        waiting |= {("W", s, m) for s in range(frozen, count) for m in range(micro_batches)}
    forwards = dict.fromkeys(range(count), 0)
    backwards = dict.fromkeys(range(count), 0)
    while waiting:
        found = []
        for kind, stage, micro in waiting:
            ready = _ready(kind, stage, micro, done, stages, count)
            if ready is None:
                continue
            if kind == "B" and schedule == "gpipe" and forwards[stage] < micro_batches:
                continue
            room = count - stage if stage >= frozen else micro_batches
            if kind == "F" and schedule == "1f1b" and forwards[stage] - backwards[stage] >= room:
                continue
            start = max(ready, free[positions[stage]])
            found.append((start, "BFW".index(kind), micro, -stage if kind == "F" else stage, kind, stage))
        start, _, micro, _, kind, stage = min(found)
        times = stages[stage]
        backward = times.backward / 2 if halves else times.backward
        end = start + (times.forward if kind == "F" else backward)
        free[positions[stage]] = done[kind, stage, micro] = end
        waiting.discard((kind, stage, micro))
        forwards[stage] += kind == "F"
        backwards[stage] += kind == "B"
    return max(done.values())


def _ready(
    kind: str,
    stage: int,
    micro: int,
    done: Mapping[tuple[str, int, int], float],
    stages: Sequence[StageTime],
    count: int,
) -> float | None:
    """When the inputs of an action are there; None while they are not."""
    if kind == "W":
        return done.get(("B", stage, micro))
    if kind == "F":
        if stage == 0:
            return 0.0
        before = done.get(("F", stage - 1, micro))
        return None if before is None else before + stages[stage - 1].message
    if stage == count - 1:
        return done.get(("F", stage, micro))
    behind = done.get(("B", stage + 1, micro))
    return None if behind is None else behind + stages[stage].message


def best_micro_batches(
    times: Sequence[SublayerTime],
    layout: Layout,
    *,
    frozen: int,
    samples: int,
    network: Network,
    wire: Wire = DENSE,
    most: int = 8,
    cached: float | None = None,
) -> list[tuple[float, int]]:
    """(predicted seconds, micro-batches), the best first, among K, 2K, ... `most` K that this schedule can run."""
    stages = layout.shape.stages
    share = samples // layout.shape.replicas
    found = []
    for factor in range(1, most + 1):
        number = factor * stages if stages > 1 else factor
        if number > max(stages, share):
            break
        try:
            if stages > 1:
                check_micro_batches(layout.schedule, number, ranks=stages)
        except UsageError:
            continue
        step = predict_step(
            times, layout,
            frozen=frozen, samples=samples, micro_batches=number, network=network, wire=wire, cached=cached,
        )  # fmt: skip
        found.append((step, number))
    return sorted(found)
