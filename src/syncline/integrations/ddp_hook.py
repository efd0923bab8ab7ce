"""A communication hook for torch's DistributedDataParallel: its buckets, our codecs and exchanges."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.futures import Future

from syncline._compat import GradBucket
from syncline.integrations.ddp_buckets import Buckets


def ddp_hook(
    spec: str, *, exchange: str | None = None, process_group: Any = None, seed: int = 0
) -> tuple[Buckets, Callable[[Buckets, GradBucket], "Future[Tensor]"]]:
    """State and hook of a codec: `ddp_model.register_comm_hook(*syncline.ddp_hook("acpsgd(rank=32) | bf16"))`.

    Call it once on every rank, and once for each DDP model. Keep the state if you save checkpoints: its
    `state_dict(ddp_model)` holds residuals and factors by parameter name.

    exchange: who talks to whom, `"ring"`; by default the codec's own.
    process_group: the one that the DDP model has; by default all ranks.
    """
    return Buckets(spec, exchange=exchange, process_group=process_group, seed=seed), hook


def hook(state: Buckets, bucket: GradBucket) -> Future[Tensor]:
    """What DDP calls with every bucket."""
    return state.average(bucket)
