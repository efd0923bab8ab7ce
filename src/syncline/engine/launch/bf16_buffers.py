"""bfloat16 on the CPU: gradients are rounded into a message that stays, and the sum is read back to where they were.

The plain way makes three fresh tensors a message (joined, rounded, widened), and fresh memory is dear on a CPU.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from syncline.codecs import Merge, Out
from syncline.codecs.coder import Payload, coder
from syncline.codecs.requests import halves_exactly


def _same(x: Tensor) -> Payload:
    return (x.to(torch.bfloat16),)


def _alone(payload: Payload, count: int) -> Tensor:
    del count
    return payload[0]


_AS_IT_IS = coder(_same, _alone, adds=True)


class Rounded:
    """A launch's messages. One launch is in flight once at a time, so their memory can be used again."""

    def __init__(self) -> None:
        self._messages: dict[Hashable, Tensor] = {}

    @staticmethod
    def takes(merge: Merge) -> bool:
        """Whether this is to be sent as bfloat16, and nobody asks for this rank's share."""
        plain = merge.tensor.dtype == torch.float32 and merge.tensor.device.type == "cpu"
        return plain and not merge.own and merge.coder.writes(torch.bfloat16)

    def write(self, merges: Sequence[Merge], world: int, *, key: Hashable = 0) -> Merge:
        """The request that carries all of these; to be summed as it is. Messages of one launch differ by their key."""
        sizes = [merge.tensor.numel() for merge in merges]
        message = self._messages.get(key)
        if message is None or message.numel() != sum(sizes):
            message = self._messages[key] = torch.empty(sum(sizes), dtype=torch.bfloat16)
        share = 1 / world if merges[0].mean else 1.0
        late = share == 1 or halves_exactly(world)
        for merge, piece in zip(merges, message.split(sizes), strict=True):
            if late:
                piece.copy_(merge.tensor)
            else:
                torch.mul(merge.tensor, share, out=piece)
        if late and share != 1:
            message.mul_(share)
        return Merge(message, _AS_IT_IS, mean=False, own=False, scratch=True)

    @staticmethod
    def read(merges: Sequence[Merge], total: Tensor) -> list[Out]:
        """The answers, each in the memory of what was asked if that may be overwritten."""
        pieces = total.split([merge.tensor.numel() for merge in merges])
        means = [
            merge.tensor.copy_(piece) if merge.scratch else piece.float()
            for merge, piece in zip(merges, pieces, strict=True)
        ]
        return [Out(mean, mean) for mean in means]
