"""`sync.metrics()`: bytes, compression ratio, residuals, step time and its prediction, as plain numbers for a log."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from syncline.engine.tuning.tuner import Tuner
from syncline.plan import Plan, Shape, predict
from syncline.plan.frozen_parameters import trained
from syncline.plan.predict import launch
from syncline.stats import mean_or_zero, median
from syncline.trace import Recorder, partition
from syncline.trace.span import STEP

STEPS = 20
"""Times of steps are medians of this many."""
_RECORDED = 5  # recorded steps of which the exposed time is computed: more cost more
_EXPOSED = ("exposed_encode", "exposed_exchange", "wait")


class StepTimes:
    """When the last steps ended, by the host's clock."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=STEPS + 1)

    def step_ended(self) -> None:
        """The first optimizer has stepped since the backward pass."""
        self._ends.append(time.perf_counter())

    @property
    def median_ms(self) -> float | None:
        """The median time between the ends of the last steps; None before the second one."""
        return 1e3 * median([end - begin for begin, end in pairwise(self._ends)]) if len(self._ends) > 1 else None


def collect(
    *,
    step: int,
    plan: Plan,
    shapes: Sequence[Shape],
    world: int,
    times: StepTimes,
    auto: Tuner | None,
    residual_share: float | None,
    recorder: Recorder,
) -> dict[str, float]:
    """The numbers that are known now; `shapes` are those of the parameters that train."""
    sent, dense = (sent_bytes(one, shapes, world) for one in (plan, _dense(plan)))
    found = {
        "step": float(step),
        "sent_bytes": sent,
        "compression_ratio": dense / sent if sent else 1.0,
        "step_ms": times.median_ms,
        "predicted_step_ms": predicted_ms(plan, auto),
        "residual_share": residual_share,
        "exposed_ms": _exposed_ms(recorder),
    }
    return {name: value for name, value in found.items() if value is not None}


def sent_bytes(plan: Plan, shapes: Sequence[Shape], world: int) -> float:
    """Bytes that the busiest rank sends in a step under a plan; of alternating steps, the mean."""
    if world == 1:
        return 0.0
    by_name = {shape.name: shape for shape in shapes}
    total = 0.0
    for unit in trained(plan, shapes).units:
        members = [by_name[name] for name in unit.parameters]
        sizes = tuple(member.shape for member in members)
        one = launch(unit.codec, unit.exchange, sizes, members[0].dtype, unit.partitions, world)
        total += unit.partitions * sum(one.sent)
    return total


def predicted_ms(plan: Plan, auto: Tuner | None) -> float | None:
    """The step time that was predicted for the plan in use; None if it was not planned."""
    predicted = plan.about.get("predicted_ms")
    if predicted is None and auto is not None and "measured_ms" in plan.about:
        # torch's reducer was timed; it was predicted only if the job was measured.
        costs, shapes = auto.costs, auto.shapes
        return None if costs is None else predict(trained(plan, shapes), shapes, costs).step * 1e3
    if predicted is None and auto is not None and auto.choice is not None:
        return auto.choice.step * 1e3  # executors are being compared
    return float(predicted) if isinstance(predicted, int | float) else None


def _dense(plan: Plan) -> Plan:
    units = tuple(replace(unit, codec="none", exchange="allreduce", partitions=1) for unit in plan.units)
    return replace(plan, units=units)


def _exposed_ms(recorder: Recorder) -> float | None:
    """Time of a step in which communication was not hidden, from the last recorded steps; None without any."""
    ended = recorder.last_steps(_RECORDED)
    if not ended:
        return None
    # Exchanges of the step before may reach into the first.
    spans = [s for s in recorder.spans(ended[0] - 1) if s.lane != STEP or s.step in ended]
    phases = partition(spans, on_gpu=recorder.device.type == "cuda")
    return mean_or_zero([sum(phases[step].get(name, 0) for name in _EXPOSED) for step in ended if step in phases]) / 1e6
