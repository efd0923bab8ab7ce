"""What is settled before the first step: the model's device, its plan, the rounds, and that all ranks mean the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline import codecs
from syncline.engine.executors.threads import Threads
from syncline.engine.launch.batches import cells_of, rounds_of
from syncline.errors import UsageError
from syncline.plan import Plan, Shape, default_plan
from syncline.plan import load as load_plan

if TYPE_CHECKING:
    from syncline.engine.sync import Sync


def one_device(parameters: Sequence[Tensor]) -> torch.device:
    """The device of all parameters, if the engine can train there."""
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): attach each part by itself"
        )
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on '{device}': move it to a CPU or CUDA device before attach")
    if any(type(p).__name__ == "DTensor" or hasattr(p, "_local_tensor") for p in parameters):
        raise UsageError("the model has DTensor parameters (FSDP, tensor parallel): attach works on plain replicas")
    return device


def first_plan(
    plan: Plan | str | Path | None,
    shapes: Sequence[Shape],
    *,
    compress: str | None,
    exchange: str | None,
    auto: bool,
    world: int,
) -> Plan:
    """The plan to begin with. `auto`: it is found later, and nothing may be laid down that it would override."""
    if auto and plan is not None:
        raise UsageError("compress='auto' finds a plan, and one was given: leave compress out, or the plan")
    if auto and exchange is not None:
        raise UsageError(
            f"compress='auto' chooses exchanges, and '{exchange}' was given: leave exchange out, or name a codec"
        )
    if plan is None:
        made = default_plan(shapes, compress=None if auto else compress, exchange=exchange)
    elif compress is not None or exchange is not None:
        raise UsageError("a plan names codecs and exchanges itself: leave compress and exchange out")
    else:
        made = plan if isinstance(plan, Plan) else load_plan(plan)
    made.check(shapes, world=max(2, world))
    return made


def rounds_in(plan: Plan, shapes: Sequence[Shape]) -> int:
    """The most communications that a launch of this plan has."""
    by_name = {s.name: s.shape for s in shapes}
    rounds = 1
    for row in plan.units:
        sizes = [by_name[name] for name in row.parameters]
        parts = cells_of(codecs.build(row.codec), row.parameters, sizes, row.partitions)
        rounds = max(rounds, *(rounds_of(cells)[0] for cells in parts))
    return rounds


def agree(sync: "Sync") -> None:
    """Raise on every rank unless all attach the same model in the same way."""
    description = "\n".join(f"{s.name} {s.shape} {s.dtype}" for s in sync.shapes)
    sync.groups.agree(description, "the models' parameters")
    sync.groups.agree(sync.plan.hash, "plans")
    tuned = None if sync.auto is None else sync.auto.allowed or "order"
    options = f"{sync.seed} {sync.sentinel} {len(sync._buffers)} {tuned}"
    sync.groups.agree(options, "attach's seed, sentinel, buffers, tune or auto")


def make_executor(sync: "Sync", workers: int) -> Any:
    """What carries launches on the model's device."""
    if sync.device.type == "cuda":
        from syncline.engine.executors.streams import Streams

        return Streams(sync.recorder, sync.device, watched=sync._watched)
    return Threads(sync.recorder, workers=workers, watched=sync._watched, cut=sync.groups.cut)
