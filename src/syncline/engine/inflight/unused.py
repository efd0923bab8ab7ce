"""Who used which parameter in a backward pass: every rank says so, and what nobody used keeps no gradient."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from syncline.engine.launch.units import Slot

if TYPE_CHECKING:
    from syncline.engine.sync import Sync


class Usage:
    """The ranks' answers on their way; nobody waits for them where all parameters were used here."""

    def __init__(self, sync: "Sync", slots: Sequence[Slot]) -> None:
        self._sync, self._slots = sync, slots
        used = [slot.fired or slot.parameter.grad is not None for slot in slots]
        self._used = torch.tensor(used, dtype=torch.int32)
        self._work = dist.all_reduce(self._used, group=sync.groups.control, async_op=True)

    def wait(self) -> None:
        """Return when all ranks have answered."""
        with self._sync._watched.communicating("the list of used parameters"):
            self._work.wait()

    def fill(self) -> None:
        """Zeros for the gradients that this rank has not and others have, or that a codec's residual needs."""
        self._sync._watched.doing = f"step {self._sync.step}: waiting for the ranks to say which parameters they used"
        self.wait()
        for slot, count in zip(self._slots, self._used.tolist(), strict=True):
            assert slot.unit is not None
            if slot.parameter.grad is None and (count or slot.unit.codec.feedback):
                slot.parameter.grad = torch.zeros_like(slot.alias)
