"""bfloat16 on the CPU: gradients are rounded into a message that stays, and the sum is read back to where they were.

The plain way makes three fresh tensors a message (joined, rounded, widened), and fresh memory is dear on a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.codecs import Merge, Out
from syncline.codecs.coder import Payload, coder
from syncline.codecs.program import halves_exactly


def _same(x: Tensor) -> Payload:
    return (x.to(torch.bfloat16),)


def _alone(payload: Payload, count: int) -> Tensor:
    del count
    return payload[0]


_AS_IT_IS = coder(_same, _alone, adds=True)


class Rounded:
    """A launch's message. One launch is in flight once at a time, so its memory can be used again."""

    def __init__(self) -> None:
        self._message: Tensor | None = None

    @staticmethod
    def takes(merge: Merge) -> bool:
        """Whether this is a gradient to be sent as bfloat16 that nobody needs any more once it was sent."""
        plain = merge.tensor.dtype == torch.float32 and merge.tensor.device.type == "cpu"
        return plain and not merge.own and merge.coder.writes(torch.bfloat16)

    def write(self, merges: Sequence[Merge], world: int) -> Merge:
        """The request that carries all of these; to be summed as it is."""
        sizes = [merge.tensor.numel() for merge in merges]
        if self._message is None or self._message.numel() != sum(sizes):
            self._message = torch.empty(sum(sizes), dtype=torch.bfloat16)
        share = 1 / world if merges[0].mean else 1.0
        late = share == 1 or halves_exactly(world)
        for merge, piece in zip(merges, self._message.split(sizes), strict=True):
            if late:
                piece.copy_(merge.tensor)
            else:
                torch.mul(merge.tensor, share, out=piece)
        if late and share != 1:
            self._message.mul_(share)
        return Merge(self._message, _AS_IT_IS, mean=False, own=False, scratch=True)

    @staticmethod
    def read(merges: Sequence[Merge], total: Tensor) -> list[Out]:
        """The answers, each in the memory of what was asked."""
        pieces = total.split([merge.tensor.numel() for merge in merges])
        for merge, piece in zip(merges, pieces, strict=True):
            merge.tensor.copy_(piece)
        return [Out(merge.tensor, merge.tensor) for merge in merges]
