"""Plans for torch's reducer: parameters in buckets of a given size, in the order of the backward pass."""

from collections.abc import Mapping, Sequence

from syncline.plan import check
from syncline.plan.check import REDUCER_CODECS
from syncline.plan.costs import Costs
from syncline.plan.predict import reducer_step
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit

FIRST_BYTES = 1 << 20
"""Size of the first bucket, as in DDP: communication starts early."""
BUCKET_BYTES = 25 << 20
"""DDP's default size of a bucket."""
SIZES = (BUCKET_BYTES, 5 << 20, 100 << 20)
"""Sizes that are weighed, DDP's default first."""
LARGEST = SIZES[-1]
"""Here the first bucket is as large as the others: for few bytes, every message is a cost."""


def bucket_plan(
    shapes: Sequence[Shape],
    *,
    codec: str = "none",
    bucket_bytes: int = BUCKET_BYTES,
    complete: Mapping[str, float] | None = None,
) -> Plan:
    """A plan for the executor `reducer`: buckets of at least `bucket_bytes`, the first of at least 1 MiB.

    `complete` has the time of each parameter's gradient in the backward pass; without it, backward is taken to be the
    reverse of the model's order. A bucket has one dtype.
    """
    check.trainable(shapes)
    backwards = list(reversed(shapes))
    if complete is not None:
        backwards.sort(key=lambda shape: complete.get(shape.name, 0.0))
    buckets: list[list[Shape]] = []
    held, first = 0, bucket_bytes if bucket_bytes >= LARGEST else FIRST_BYTES
    for shape in backwards:
        limit = first if len(buckets) == 1 else bucket_bytes
        full = not buckets or held >= min(limit, bucket_bytes)
        if full or buckets[-1][0].dtype != shape.dtype:
            buckets.append([])
            held = 0
        buckets[-1].append(shape)
        held += shape.nbytes
    units = [_unit(number, bucket, codec) for number, bucket in enumerate(buckets)]
    order = tuple((unit.name, 0) for unit in units)
    return Plan(tuple(reversed(units)), order, executor="reducer")


def _unit(number: int, bucket: Sequence[Shape], codec: str) -> Unit:
    names = tuple(shape.name for shape in reversed(bucket))
    return Unit(f"bucket {number}", names, codec, "allreduce", 1)


def bucket_plans(
    shapes: Sequence[Shape], trained: Sequence[Shape], costs: Costs, codecs: Sequence[str]
) -> list[tuple[float, Plan]]:
    """Plans of the whole model for torch's reducer, with predicted steps: those of the best of these codecs."""
    found: dict[str, tuple[float, int, Plan]] = {}
    for codec in codecs:
        for size in SIZES if codec in REDUCER_CODECS else ():
            plan = bucket_plan(shapes, codec=codec, bucket_bytes=size, complete=costs.complete)
            found.setdefault(plan.hash, (reducer_step(plan, trained, costs), len(found), plan))
    ranked = sorted(found.values())
    return [(step, plan) for step, _, plan in ranked if plan.units[0].codec == ranked[0][2].units[0].codec]
