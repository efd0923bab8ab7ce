"""Agreement of the ranks in a backward pass: parameters that were used, parameters that are frozen, the executor.

Each is one all-reduce of the same size over the control group. So a rank that has frozen parameters alone meets the
others' report of used parameters, and all of them see at once that the ranks differ. Under torch's reducer there is no
such report: there, the heartbeats of the others say that they have begun the pass without a change.
"""

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from syncline.engine.launch.units import Slot
from syncline.engine.process_groups import names_of
from syncline.engine.protocols import EngineView
from syncline.errors import UsageError

_TRAINS = 1 << 32
"""Weight of "requires gradients" in the sums; below it, ranks that used the parameter are counted."""
_SHOWN = 3


class UsedParameters:
    """The number of ranks that used each parameter in a backward pass; it is summed over the ranks in the background.

    Nobody waits for it where all parameters were used on this rank.
    """

    def __init__(self, engine: EngineView, slots: Sequence[Slot]) -> None:
        self._engine, self._slots = engine, slots
        self.all_here = all(slot.fired for slot in slots)
        """Whether this rank used all of them."""
        for slot in slots:
            if not slot.fired:
                slot.kept_grad = slot.parameter.grad is not None
        used = torch.zeros(len(engine.slots) + engine.world, dtype=torch.int64)
        if engine.rank < engine.trainers:
            used[[slot.index for slot in slots if slot.fired or slot.kept_grad]] = 1
        self._sums = used
        self._work = dist.all_reduce(used, group=engine.groups.control, async_op=True)

    def wait(self) -> None:
        """Return when all ranks have answered."""
        engine = self._engine
        with engine.communicating("the list of used parameters"):
            self._work.wait()
        if self._sums[len(engine.slots) :].any():
            sums, announced = self._sums.tolist(), _announcing(engine, self._sums)
            frozen = [s.name for s in engine.slots if sums[s.index] // _TRAINS < len(announced) and s.unit is not None]
            trained = [s.name for s in engine.slots if sums[s.index] // _TRAINS and s.unit is None]
            error = _differ(announced, _others(engine, announced), frozen, trained)
            engine.fail(error)
            raise error

    def fill_with_zeros(self) -> None:
        """Zeros for missing gradients that other ranks have. What no rank used keeps None, as with DDP."""
        engine = self._engine
        engine.tell_peers(f"step {engine.step}: waiting for the ranks to say which parameters they used")
        self.wait()
        for slot in self._slots:
            if slot.parameter.grad is None and self._sums[slot.index]:
                slot.parameter.grad = torch.zeros_like(slot.parameter.detach())


def agree_on_frozen(engine: EngineView, before: Sequence[bool]) -> None:
    """Raise on every rank unless all ranks have frozen and unfrozen the same parameters since the last pass.

    `before`: for each parameter, whether it was trained until now.
    """
    now = torch.tensor([slot.parameter.requires_grad for slot in engine.slots])
    sums = torch.zeros(len(engine.slots) + engine.world, dtype=torch.int64)
    sums[: len(now)] = now * _TRAINS
    sums[len(now) + engine.rank] = 1
    announced, others = _meet(engine, sums, "which parameters they train")
    if others:
        # They are in a pass with the old units, and learn it from their report, or from the alarm.
        changed = [
            (slot.name, bool(new)) for slot, new, old in zip(engine.slots, now, before, strict=True) if new != old
        ]
        off, on = ([name for name, new in changed if new is kind] for kind in (False, True))
        raise engine.refuse(_differ(announced, others, off, on))
    if all(total in (0, engine.world * _TRAINS) for total in sums[: len(now)].tolist()):
        return
    rows = engine.groups.gather(now)
    ranks = engine.groups.ranks
    odd = [slot for slot, column in zip(engine.slots, rows.T, strict=True) if column.any() and not column.all()]
    parts = []
    for slot in odd[:_SHOWN]:
        frozen = [ranks[r] for r in range(engine.world) if not rows[r, slot.index]]
        parts.append(f"'{slot.name}' is frozen on {names_of(frozen)} alone")
    raise UsageError(f"{_WHAT}: {', '.join(parts)}{_more(len(odd))}; {_FIX}")


def agree_to_leave_reducer(engine: EngineView, why: str) -> None:
    """Raise on every rank unless all ranks leave torch's reducer in this pass. Otherwise messages would not fit."""
    sums = torch.zeros(len(engine.slots) + engine.world, dtype=torch.int64)
    sums[: len(engine.slots)] = torch.tensor([slot.parameter.requires_grad for slot in engine.slots]) * _TRAINS
    sums[len(engine.slots) + engine.rank] = 1
    announced, others = _meet(engine, sums, "how they run this backward pass")
    if others:
        raise engine.refuse(
            UsageError(
                f"{why} on {names_of(announced)}, and not on {names_of(others)}: run the same backward pass in the same"
                " way on every rank"
            )
        )


def _meet(engine: EngineView, sums: torch.Tensor, what: str) -> tuple[list[int], list[int]]:
    """Sum over the ranks; returns the ranks (global) that take part because of a change, and those that do not."""
    agreed = threading.Event()
    engine.tell_peers(f"step {engine.step}: waiting for the ranks to say {what}")
    try:
        with engine.communicating(f"the agreement on {what}"):
            work = dist.all_reduce(sums, group=engine.groups.control, async_op=True)
            assert work is not None
            work.get_future().add_done_callback(lambda _: agreed.set())
            if others := engine.wait_for_agreement(agreed):
                return [engine.groups.ranks[engine.rank]], others
            work.wait()
    finally:
        if not agreed.is_set():
            engine.groups.cut_agreements()
    announced = _announcing(engine, sums)
    return announced, _others(engine, announced)


_WHAT = "the parameters that require gradients differ between the ranks"
_FIX = "freeze and unfreeze the same parameters on every rank before the same backward pass"


def _announcing(engine: EngineView, sums: torch.Tensor) -> list[int]:
    """The ranks (global) that have frozen or unfrozen parameters before this pass."""
    flags = sums[len(engine.slots) :].tolist()
    return [rank for rank, flag in zip(engine.groups.ranks, flags, strict=True) if flag]


def _others(engine: EngineView, announced: list[int]) -> list[int]:
    return [rank for rank in engine.groups.ranks if rank not in announced]


def _differ(announced: list[int], others: list[int], frozen: list[str], trained: list[str]) -> UsageError:
    """The error for ranks of which only some have changed what they train."""
    did = [
        f"{verb} {', '.join(repr(name) for name in names[:_SHOWN])}{_more(len(names))}"
        for verb, names in (("froze", frozen), ("unfroze", trained))
        if names
    ]
    return UsageError(f"{_WHAT}: {names_of(announced)} {' and '.join(did)}, and {names_of(others)} did not; {_FIX}")


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""
