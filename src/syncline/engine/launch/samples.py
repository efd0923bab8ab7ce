"""Samples of a launch: values of its gradients at some places, before and after the exchange, summed over passes.

The mean of the own values over the ranks is the exact average at these places, whatever the codec does. Beside the
averaged values it shows the error of the codec in the running job, for a few reads of memory.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from syncline.codecs.state import derive
from syncline.engine.launch.batches import CodecBatch


class LaunchSamples:
    """Sums at places that all ranks choose alike. Thread: the one that runs the launch; read when it is done."""

    def __init__(self, batches: Sequence[CodecBatch], device: torch.device, *, most: int, steps: range) -> None:
        """`most`: about how many places in all batches together. `steps`: whose passes are sampled.

        A launch of an earlier step may still be running when its samples are made.
        """
        self.steps = steps
        sizes = [torch.Size(batch.shape).numel() for batch in batches]
        self._pieces: list[tuple[int, Tensor]] = []
        """Parameters of the unit, and places in their gradients."""
        self._packed: list[Tensor] = []
        """By batch: the same places in its packed gradient."""
        for batch, size in zip(batches, sizes, strict=True):
            count = min(size, max(1, most * size // max(1, sum(sizes))))
            numbers = torch.Generator().manual_seed(derive("samples", *batch.names))
            places = torch.randint(max(1, size), (count,), generator=numbers).sort().values
            self._packed.append(places.to(device))
            members = [(i, first, part.numel()) for i, first, part in batch.outputs(_shape_only(batch))]
            starts = [0, *accumulate(length for _, _, length in members)]
            for (member, first, length), start in zip(members, starts, strict=False):
                inside = places[(places >= start) & (places < start + length)]
                if len(inside):
                    self._pieces.append((member, (inside - start + first).to(device)))
        self.count = sum(len(places) for _, places in self._pieces)
        self.own = torch.zeros(self.count, device=device)
        """This rank's gradients, summed over the passes."""
        self.averaged = torch.zeros(self.count, device=device)
        """The averaged gradients, as they were received."""
        self.squares = torch.zeros(self.count, device=device)
        """The squares of the averaged gradients, summed over the passes."""
        self.residual = torch.zeros(self.count, device=device)
        """What this rank held back in the last pass."""

    @property
    def lengths(self) -> list[int]:
        """How many places each parameter has; the sums hold one parameter after the other."""
        return [len(places) for _, places in self._pieces]

    def before(self, grads: Sequence[Tensor]) -> None:
        """The launch begins with these gradients of its unit."""
        self.own += torch.cat([grads[at].reshape(-1)[places].float() for at, places in self._pieces])

    def after(self, averages: Sequence[Tensor | None], states: Sequence[Mapping[str, Tensor]]) -> None:
        """The averaged gradients of its unit are there (None: no rank used it), and the batches' new states."""
        found = [
            torch.zeros(len(places), device=places.device)
            if (average := averages[at]) is None
            else average.reshape(-1)[places].float()
            for at, places in self._pieces
        ]
        values = torch.cat(found)
        self.averaged += values
        self.squares += values.square_()
        held = [
            state["error"].reshape(-1)[places].float()
            if "error" in state
            else torch.zeros_like(places, dtype=torch.float32)
            for state, places in zip(states, self._packed, strict=True)
        ]
        self.residual = torch.cat(held)


def _shape_only(batch: CodecBatch) -> Tensor:
    return torch.empty(batch.shape, device="meta")
