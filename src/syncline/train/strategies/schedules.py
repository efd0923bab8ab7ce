"""Schedules of the engine with parts of it switched off, for ablations: `syncline(int8, schedule=fifo)`.

Each one is a real plan or engine setting. All but the default one wait for all updates before the next forward pass.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from syncline.engine import Sync
from syncline.plan import Plan, default_plan, shape_of
from syncline.plan.default import GROUP_BYTES, PART_BYTES


@dataclass(frozen=True)
class Schedule:
    """What of the engine is in use."""

    overlap: bool = True
    """Launch during the backward pass, several at once. Else after it, one at a time."""
    ordered: bool = True
    """Cut units into parts and launch them in a planned order. Else whole units, first in first out."""
    grouped: bool = True
    """Send small modules together. Else one unit per module."""
    planned: bool = False
    """The engine plans by itself: codecs for each unit (`auto`), units and order."""

    def plan(self, module: nn.Module, *, compress: str, exchange: str) -> Plan | None:
        """The plan of a model; None if the engine plans by itself."""
        if self.planned:
            return None
        named = [(n, p) for n, p in module.named_parameters() if p.is_floating_point() or p.is_complex()]
        made = default_plan(
            [shape_of(name, parameter) for name, parameter in named],
            compress=compress,
            exchange=exchange,
            group_bytes=GROUP_BYTES if self.grouped else 0,
            part_bytes=PART_BYTES if self.ordered else sys.maxsize,
        )
        # The backward pass completes units from the last one to the first one.
        return made if self.ordered else replace(made, order=tuple((unit.name, 0) for unit in reversed(made.units)))

    def start(self, sync: Sync) -> None:
        """Switch the overlap off, if this schedule has none."""
        if not self.overlap:
            sync.profile(_NotObserved())


SCHEDULES = {
    "serial": Schedule(overlap=False, ordered=False, grouped=False),
    "fifo": Schedule(ordered=False, grouped=False),
    "ordered": Schedule(grouped=False),
    "batched": Schedule(),
    "barrier": Schedule(planned=True),
}


class _NotObserved:
    """A `StepObserver` that notes nothing: the engine runs its parts one after the other."""

    def gradient_complete(self, slot: object) -> None:
        """Nothing to note."""

    @contextmanager
    def issuing_launches(self) -> Iterator[None]:
        """Nothing to note."""
        yield

    issuing_update = issuing_launches

    def backward_ended(self) -> None:
        """Nothing to note."""

    updates_begin = updates_issued = updates_done = backward_ended
