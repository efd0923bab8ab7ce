"""`attach`: the one line that a training loop needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.engine.sync import Sync
from syncline.plan import Plan
from syncline.trace import Recorder
from syncline.trace.record.environment import record_attached


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    compress: str | None = None,
    plan: Plan | str | Path | None = None,
    exchange: str | None = None,
    process_group: Any = None,
    buffers: bool = True,
    update: str | None = None,
    timeout: float | None = None,
    sentinel: int = 100,
    recorder: Recorder | None = None,
    seed: int = 0,
    workers: int = 3,
    tune: bool = True,
) -> Sync:
    """Train `model` data-parallel: its gradients are averaged over the ranks, and `optimizer` steps as they arrive.

    Call it once on every rank, after the model is on its device. Parameters and buffers start as rank 0 has them. The
    loop stays as it is; `optimizer.step()` returns at once and whatever touches a parameter waits for its update.

    optimizer: one or several optimizers of the model; with None, call `sync.wait()` before you read gradients.
    compress: a codec, `"powersgd(rank=4) | bf16"`; None sends gradients as they are; "auto" measures and chooses.
    plan: a `Plan` or the path of one, instead of compress and exchange.
    exchange: who talks to whom, `"ring"`; by default the codec's own.
    process_group: a group or one dimension of a DeviceMesh; by default all ranks.
    buffers: send rank 0's buffers (BatchNorm statistics) after every backward pass.
    update: "unit" or "whole" steps; by default whole only for optimizers that may look at all parameters at once.
    timeout: seconds after which a peer that does not come is an error; by default the group's.
    tune: time a few early steps without overlap, and find the launch order for this job (on a GPU whose host is the
        bound, larger units too); not with a plan.
    sentinel: every so many steps, check that replicas are equal and residuals small; 0 never.
    recorder: where spans are recorded; by default the process's own, which `trace.start()` or SYNCLINE_TRACE turn on.
    seed: of codecs that draw random numbers; must be the same on all ranks.
    workers: threads that encode and exchange, on the CPU.
    """
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    sync = Sync(
        model,
        list(optimizers),
        compress=compress,
        plan=plan,
        exchange=exchange,
        process_group=process_group,
        buffers=buffers,
        update=update,
        timeout=timeout,
        sentinel=sentinel,
        recorder=recorder,
        seed=seed,
        workers=workers,
        tune=tune,
    )
    if recorder is None:
        record_attached(model, list(optimizers))  # SYNCLINE_TRACE
    return sync
