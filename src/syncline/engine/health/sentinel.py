"""The sentinel: every so many steps, are the replicas still equal, and are residuals small next to gradients?

All ranks see the same table (one row a rank, one gather), so all come to the same verdict. Replicas that differ are
made equal again; units in trouble fall back to dense. Both are said in a `SynclineWarning`, on every rank.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.engine.launch.run import norm
from syncline.engine.launch.units import UnitRun
from syncline.engine.process_groups import flattened, names_of, spread
from syncline.errors import SynclineWarning, UsageError
from syncline.plan import Plan

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

LIMIT = 1000.0
"""How many times the gradient a residual may be.

A sparsifier that sends a share r of the values holds back about 1 / (2 sqrt(r)) of what it sends, times sqrt(ranks)
where ranks choose different values: 16 for r = 0.001, 130 on 64 ranks. Beyond a thousand, a codec adds to its residual
faster than it pays it back, or will send what it holds when that is long out of date.
"""

_SHOWN = 3
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sentinel:
    """Looks after a step, repairs replicas, and takes units back to dense."""

    def __init__(self, sync: "Sync") -> None:
        if sync.sentinel < 0:
            raise UsageError(f"sentinel is {sync.sentinel}: use a number of steps, or 0 for never")
        self._sync = sync
        self._falling: set[str] = set()
        self.fell = False
        """Whether units were made dense: then nobody may compress them again."""

    def due(self, step: int) -> bool:
        """Whether the end of the step with this number (from 1) is looked at."""
        every = self._sync.sentinel
        return every > 0 and (step == 1 or step % every == 0)

    def stepped(self, *, counted: bool) -> None:
        """An optimizer has stepped; `counted` if it was the first to do so since a backward pass."""
        told = self._look() if counted and self.due(self._sync.step) else []
        if self._falling:
            self._fall_back()
        # Last: a user may have made warnings errors.
        for text in told:
            warnings.warn(text, SynclineWarning, stacklevel=2)

    def _look(self) -> list[str]:
        sync = self._sync
        sync.wait()
        kept = [unit for unit in sync.units if unit.codec.feedback]
        sync._watched.doing = f"step {sync.step}: waiting for the ranks' checksums"
        with sync.recorder.span("update", "sentinel", unit="all"), torch.no_grad():
            sums = torch.stack([checksum(slot.parameter) for slot in sync.slots])
            norms = [_norms(unit, sync.device) for unit in kept]
            row = torch.cat([sums, *(n.double().view(torch.int64) for n in norms)]).cpu()
            with sync._watched.communicating("the sentinel's checksums"):
                rows = sync.groups.gather(row)
            split = len(sync.slots)
            told = self._replicas(rows[:, :split])
            for at, unit in enumerate(kept):
                told += self._residual(unit, rows[:, split + 3 * at :][:, :3].contiguous().view(torch.float64))
        return told

    def _replicas(self, sums: Tensor) -> list[str]:
        """Make replicas equal again, as most ranks have them (of equally many, the lowest ranks)."""
        sync = self._sync
        values = [tuple(row) for row in sums.tolist()]
        most = max(Counter(values).values())
        source = next(rank for rank, value in enumerate(values) if values.count(value) == most)
        slots = [slot for slot, bad in zip(sync.slots, (sums != sums[source]).any(0).tolist(), strict=True) if bad]
        if not slots:
            return []
        ranks = sync.groups.ranks
        odd = names_of([ranks[rank] for rank, value in enumerate(values) if value != values[source]])
        with sync._watched.communicating("the repair of replicas"):
            for flat, members in flattened([slot.parameter for slot in slots]):
                dist.broadcast(flat, src=ranks[source], group=sync.groups.rounds[0])
                spread(flat, members)
        units = list({slot.unit.row.name: slot.unit for slot in slots if slot.unit is not None}.values())
        return [
            f"replicas differ after step {sync.step}: {_some(slot.name for slot in slots)} on {odd};"
            f" repaired with the parameters of rank {ranks[source]}, while optimizer state stays as each rank has it;"
            f" {self._dense(units)}"
        ]

    def _residual(self, unit: UnitRun, norms: Tensor) -> list[str]:
        """`norms`: residual, this rank's gradient and the averaged one; a row a rank."""
        sync = self._sync
        error, scale = norms[:, 0], norms[:, 1:].amax(1)
        broken = ~error.isfinite()
        # Without a gradient (the unit took no part) there is nothing to compare with; of a broken one, state is as old.
        large = scale.isfinite() & (scale > 0) & (error > LIMIT * scale)
        bad = (broken | large).nonzero().flatten().tolist()
        if not bad:
            return []
        ranks = [sync.groups.ranks[rank] for rank in bad]
        worst = max(bad, key=lambda rank: float(error[rank].nan_to_num(torch.inf, torch.inf)))
        lost = [sync.groups.ranks[rank] for rank in broken.nonzero().flatten().tolist()]
        owed = "is paid with the next gradient" if len(lost) < sync.world else "was not finite and is dropped"
        if lost and len(lost) < sync.world:
            owed += f" (on {names_of(lost)} it was not finite and is dropped)"
        return [
            f"residual too large after step {sync.step}: unit '{unit.row.name}' ({unit.row.codec}) holds back"
            f" {float(error[worst]):.3g} with a gradient of {float(scale[worst]):.3g} on {names_of(ranks)}"
            f" (the limit is {LIMIT:g} times it); {self._dense([unit])}; what was held back {owed}"
        ]

    def _dense(self, units: Sequence[UnitRun]) -> str:
        names = [unit.row.name for unit in units if unit.row.codec != "none"]
        self._falling |= set(names)
        if not names:
            return "the gradients are sent dense already"
        return f"unit{'s' if len(names) > 1 else ''} {_some(names)} will be sent dense"

    def _fall_back(self) -> None:
        """Replan; a unit whose exchange still waits for the step of another optimizer does so after that."""
        sync = self._sync
        sync.wait()  # `fresh` is cleared by the thread of updates: before this the ranks may see it differently
        ready = [unit for unit in sync.units if unit.row.name in self._falling and not unit.fresh]
        self._falling &= {unit.row.name for unit in sync.units if unit.fresh}
        if not ready:
            return
        self.fell = True
        for unit in ready:
            for cell in [cell for launch in unit.launches for cell in launch.cells]:
                if "error" in cell.state and not norm([cell.state["error"]]).isfinite():
                    del cell.state["error"]
        sync.replan(dense(sync.plan, {unit.row.name for unit in ready}))


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's values read as integers, on its device: one bit that differs shows.

    >>> int(checksum(torch.tensor([1.0, 2.0])) - checksum(torch.tensor([1.0, 1.0])))
    8388608
    """
    return tensor.detach().view(_INTS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def dense(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with these units uncompressed and whole, each launched where its first part was."""
    units = [
        replace(unit, codec="none", exchange="allreduce", partitions=1) if unit.name in names else unit
        for unit in plan.units
    ]
    order: list[Any] = [(name, 0) if name in names else (name, part) for name, part in plan.order]
    return replace(plan, units=tuple(units), order=tuple(dict.fromkeys(order)))


def _norms(unit: UnitRun, device: torch.device) -> Tensor:
    """Norms of the residual, of this rank's last gradient and of the averaged one; nan for what was not measured."""
    errors = [cell.state["error"] for launch in unit.launches for cell in launch.cells if "error" in cell.state]
    residual = norm(errors) if errors else torch.zeros((), device=device)
    measured = [launch.norms for launch in unit.launches if launch.norms is not None]
    if len(measured) < len(unit.launches):
        return torch.stack([residual, *torch.full((2,), torch.nan, device=device)])
    return torch.cat([residual[None], torch.linalg.vector_norm(torch.stack(measured), dim=0)])


def _some(names: Iterable[str]) -> str:
    shown = [f"'{name}'" for name in names]
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
