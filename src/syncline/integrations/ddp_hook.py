"""`ddp_hook`: a communication hook for torch's DistributedDataParallel with our codecs and exchanges."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.futures import Future

from syncline._compat import GradBucket
from syncline.integrations.ddp_buckets import Buckets


def ddp_hook(
    spec: str, *, exchange: str | None = None, process_group: Any = None, seed: int = 0
) -> tuple[Buckets, Callable[[Buckets, GradBucket], "Future[Tensor]"]]:
    """The state and the hook for a codec: `ddp_model.register_comm_hook(*syncline.ddp_hook("acpsgd(rank=32) | bf16"))`.

    Call it once on every rank, and once for each DDP model. Keep the state if you save checkpoints: its
    `state_dict(ddp_model)` holds residuals and factors by parameter name.

    Args:
        spec: A codec spec such as `"powersgd(rank=4)"`; `"none"` is plain DDP.
        exchange: The communication pattern, such as `"ring"`. None: the codec's default.
        process_group: The process group of the DDP model. None: all ranks.
        seed: Seed of codecs that draw random numbers; the same on all ranks.
    """
    return Buckets(spec, exchange=exchange, process_group=process_group, seed=seed), hook


def hook(state: Buckets, bucket: GradBucket) -> Future[Tensor]:
    """DDP calls this with every bucket."""
    return state.average(bucket)
