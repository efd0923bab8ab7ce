"""Reused bfloat16 send buffers on the CPU: gradients are rounded into them and the sum is read back in place.

Without them every message takes three new tensors (joined, rounded, widened), and new memory is slow on a CPU.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from syncline.codecs import Merge, Out
from syncline.codecs.coder import Payload, coder
from syncline.codecs.requests import halves_exactly


def _to_bf16(x: Tensor) -> Payload:
    return (x.to(torch.bfloat16),)


def _from_bf16(payload: Payload, count: int) -> Tensor:
    del count
    return payload[0]


_BF16_AS_IS = coder(_to_bf16, _from_bf16, adds=True)


class Bf16Buffers:
    """The send buffers of one launch, one per message. A launch runs once at a time, so its buffers can be reused."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    @staticmethod
    def can_send(merge: Merge) -> bool:
        """Whether the request is sent as bfloat16 from CPU memory, and this rank's own share is not needed."""
        plain = merge.tensor.dtype == torch.float32 and merge.tensor.device.type == "cpu"
        return plain and not merge.tracks_loss and merge.residual is None and merge.coder.writes(torch.bfloat16)

    def write(self, merges: Sequence[Merge], world: int, *, key: Hashable = 0) -> Merge:
        """One request that carries all of these, to be summed as it is. `key` tells the messages of a launch apart."""
        sizes = [merge.tensor.numel() for merge in merges]
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() != sum(sizes):
            buffer = self._buffers[key] = torch.empty(sum(sizes), dtype=torch.bfloat16)
        share = 1 / world if merges[0].mean else 1.0
        divide_last = share == 1 or halves_exactly(world)
        for merge, part in zip(merges, buffer.split(sizes), strict=True):
            if divide_last:
                part.copy_(merge.tensor)
            else:
                torch.mul(merge.tensor, share, out=part)
        if divide_last and share != 1:
            buffer.mul_(share)
        return Merge(buffer, _BF16_AS_IS, mean=False, own=False, scratch=True)

    @staticmethod
    def read(merges: Sequence[Merge], total: Tensor) -> list[Out]:
        """The answers to these requests, each in the request's own memory if that may be overwritten."""
        parts = total.split([merge.tensor.numel() for merge in merges])
        means = [
            merge.tensor.copy_(part) if merge.scratch else part.float()
            for merge, part in zip(merges, parts, strict=True)
        ]
        return [Out(mean, mean) for mean in means]
