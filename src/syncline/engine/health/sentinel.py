"""The sentinel checks every N steps that replicas are equal and that residuals are small next to gradients.

All ranks gather the same table (one row per rank), so all decide alike. Replicas that differ are repaired, and units in
trouble fall back to dense. Both are reported in a `SynclineWarning` on every rank.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline import exchange
from syncline.engine.launch.run import norm
from syncline.engine.launch.units import UnitRun, checksum
from syncline.engine.process_groups import flattened, names_of, spread
from syncline.engine.protocols import EngineView
from syncline.errors import SynclineWarning, UsageError
from syncline.plan import Plan

LIMIT = 1000.0
"""Largest allowed ratio of a residual to its gradient.

A sparsifier that sends a fraction r of the values holds back about 1 / (2 sqrt(r)) of what it sends, times sqrt(ranks)
if ranks choose different values: 16 for r = 0.001, 130 on 64 ranks. Beyond a thousand, a codec adds to its residual
faster than it sends it, or will send values that are long out of date.
"""

_SHOWN = 3


class Sentinel:
    """Checks after a step, repairs replicas, and makes units dense."""

    def __init__(self, engine: EngineView, *, every: int) -> None:
        if every < 0:
            raise UsageError(f"sentinel is {every}: use a number of steps, or 0 for never")
        self._engine, self._every = engine, every
        self._falling_back: set[str] = set()
        self.fell_back = False
        """Whether units were made dense: they must not be compressed again."""
        self.residual_share: float | None = None
        """Norm of all ranks' residuals over that of their gradients, at the last check; None if unknown."""

    def due(self, step: int) -> bool:
        """Whether to check after the step with this number (from 1)."""
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def after_optimizer_step(self, *, first: bool) -> None:
        """An optimizer has stepped; `first`: no other one has since the backward pass."""
        problems = self._check() if first and self.due(self._engine.step) else []
        if self._falling_back:
            self._fall_back()
        # Last: a user may have turned warnings into errors.
        for text in problems:
            warnings.warn(text, SynclineWarning, stacklevel=2)

    def _check(self) -> list[str]:
        """Gather checksums and norms of all ranks; returns a sentence for each problem."""
        engine = self._engine
        engine.wait()
        kept = [unit for unit in engine.units if unit.codec.feedback]
        engine.tell_peers(f"step {engine.step}: waiting for the ranks' checksums")
        with engine.recorder.span("update", "sentinel", unit="all"), torch.no_grad():
            sums = torch.stack([checksum(slot.parameter) for slot in engine.slots])
            norms = [_norms(unit, engine.device) for unit in kept]
            row = torch.cat([sums, *(n.double().view(torch.int64) for n in norms)]).cpu()
            with engine.communicating("the sentinel's checksums"):
                rows = engine.groups.gather(row)
            split = len(engine.slots)
            problems = self._check_replicas(rows[:, :split])
            self.residual_share = _residual_share(rows[:, split:].contiguous().view(torch.float64))
            for at, unit in enumerate(kept):
                problems += self._check_residual(
                    unit, rows[:, split + 3 * at :][:, :3].contiguous().view(torch.float64)
                )
        return problems

    def _check_replicas(self, sums: Tensor) -> list[str]:
        """Give all ranks the parameters that most ranks have (in a tie, those of the lowest rank)."""
        engine = self._engine
        values = [tuple(row) for row in sums.tolist()]
        most = max(Counter(values).values())
        source = next(rank for rank, value in enumerate(values) if values.count(value) == most)
        slots = [slot for slot, bad in zip(engine.slots, (sums != sums[source]).any(0).tolist(), strict=True) if bad]
        if not slots:
            return []
        ranks = engine.groups.ranks
        different = names_of([ranks[rank] for rank, value in enumerate(values) if value != values[source]])
        with engine.communicating("the repair of replicas"):
            for flat, members in flattened([slot.parameter for slot in slots]):
                dist.broadcast(flat, src=ranks[source], group=engine.groups.rounds[0])
                spread(flat, members)
        units = list({slot.unit.row.name: slot.unit for slot in slots if slot.unit is not None}.values())
        return [
            f"replicas differ after step {engine.step}: {_some(slot.name for slot in slots)} on {different};"
            f" repaired with the parameters of rank {ranks[source]}, while optimizer state stays as each rank has it;"
            f" {self._dense(units)}"
        ]

    def _check_residual(self, unit: UnitRun, norms: Tensor) -> list[str]:
        """`norms`: of the residual, the rank's own gradient and the averaged gradient; one row per rank."""
        engine = self._engine
        error, scale = norms[:, 0], norms[:, 1:].amax(1)
        broken = ~error.isfinite()
        # Without a finite gradient there is nothing to compare with, and the step left the residual as it was.
        large = scale.isfinite() & (scale > 0) & (error > LIMIT * scale)
        bad = (broken | large).nonzero().flatten().tolist()
        if not bad:
            return []
        ranks = [engine.groups.ranks[rank] for rank in bad]
        worst = max(bad, key=lambda rank: float(error[rank].nan_to_num(torch.inf, torch.inf)))
        lost = [engine.groups.ranks[rank] for rank in broken.nonzero().flatten().tolist()]
        rest = "is sent with the next gradient" if len(lost) < engine.world else "was not finite and is dropped"
        if lost and len(lost) < engine.world:
            rest += f" (on {names_of(lost)} it was not finite and is dropped)"
        return [
            f"residual too large after step {engine.step}: unit '{unit.row.name}' ({unit.row.codec}) holds back"
            f" {float(error[worst]):.3g} with a gradient of {float(scale[worst]):.3g} on {names_of(ranks)}"
            f" (the limit is {LIMIT:g} times it); {self._dense([unit])}; what was held back {rest}"
        ]

    def _dense(self, units: Sequence[UnitRun]) -> str:
        names = [unit.row.name for unit in units if unit.row.codec != "none"]
        self._falling_back |= set(names)
        if not names:
            return "the gradients are sent dense already"
        return f"unit{'s' if len(names) > 1 else ''} {_some(names)} will be sent dense"

    def _fall_back(self) -> None:
        """Replan. A unit whose gradients another optimizer has still to apply falls back after that step."""
        engine = self._engine
        engine.wait()  # the update thread clears `uncommitted`; before this, ranks may see different values
        ready = [unit for unit in engine.units if unit.row.name in self._falling_back and not unit.uncommitted]
        self._falling_back &= {unit.row.name for unit in engine.units if unit.uncommitted}
        if not ready:
            return
        self.fell_back = True
        for unit in ready:
            for batch in [batch for launch in unit.launches for batch in launch.batches]:
                if "error" in batch.state and not norm([batch.state["error"]]).isfinite():
                    del batch.state["error"]
        engine.replan(dense(engine.plan, {unit.row.name for unit in ready}))


def dense(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with these units uncompressed and in one part, each launched where its first part was."""
    units = [
        replace(unit, codec="none", exchange=_dense_exchange(unit.exchange), partitions=1)
        if unit.name in names
        else unit
        for unit in plan.units
    ]
    order: list[Any] = [(name, 0) if name in names else (name, part) for name, part in plan.order]
    # Units may have different codecs now, which torch's reducer cannot run.
    return replace(plan, units=tuple(units), order=tuple(dict.fromkeys(order)), executor="overlap")


def _dense_exchange(text: str) -> str:
    """All-reduce, unless some ranks may not train: those would count in it."""
    return "allreduce" if exchange.build(text).definition.workers is None else text


def _residual_share(norms: Tensor) -> float | None:
    """From columns of residual, own and averaged gradient for each unit with a residual, and a row per rank."""
    if not norms.numel():
        return 0.0
    residuals, gradients = norms[:, 0::3].norm(), norms[:, 1::3].norm()
    return float(residuals / gradients) if bool(residuals.isfinite() & (gradients > 0) & gradients.isfinite()) else None


def _norms(unit: UnitRun, device: torch.device) -> Tensor:
    """Norms of the residual, of this rank's last gradient and of the averaged one; nan if not measured."""
    errors = [batch.state["error"] for launch in unit.launches for batch in launch.batches if "error" in batch.state]
    residual = norm(errors) if errors else torch.zeros((), device=device)
    measured = [launch.norms for launch in unit.launches if launch.norms is not None]
    if len(measured) < len(unit.launches):
        return torch.stack([residual, *torch.full((2,), torch.nan, device=device)])
    return torch.cat([residual[None], torch.linalg.vector_norm(torch.stack(measured), dim=0)])


def _some(names: Iterable[str]) -> str:
    shown = [f"'{name}'" for name in names]
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
