"""Measured errors of codecs on a job's own gradients: averaged gradients of a few steps, run through each codec.

Gradients that were sent uncompressed are averaged already, so no message is needed: a codec runs on them as on one
rank. For codecs that are linear in the gradient (PowerSGD) that is the error of the average; for quantizers and
sparsifiers it is more than that, since the errors of several ranks partly cancel. Each rank measures its share of the
parameters.
"""

from collections.abc import Collection, Sequence
from dataclasses import astuple
from itertools import count

import torch
from torch import Tensor

from syncline import codecs
from syncline.codecs.build import LATE
from syncline.engine.launch.units import Slot, as_real
from syncline.engine.protocols import EngineView
from syncline.plan.errors import MOST, ROUNDING, CodecError, Errors
from syncline.plan.predict import built

_ROW = 5
"""Numbers for each parameter and codec: its energy, and the four of a `CodecError`."""
_SMALLEST = 1e-8
"""Values below this are zero for an optimizer: it is Adam's usual epsilon."""
_CHUNK = 1 << 20
"""Values that are compared at a time, so that a large parameter needs little memory beside its gradients."""


class GradientHistory:
    """Copies of the averaged gradients of some steps, of the parameters that this rank measures."""

    def __init__(self, engine: EngineView, names: Sequence[str] | None = None, *, exact: Collection[str] = ()) -> None:
        """`names`: the parameters to measure; None: all. The same on all ranks.

        `exact`: codecs whose averages count as exact, besides those that only round.
        """
        self._exact = {*ROUNDING, *exact}
        slots = [slot for slot in engine.slots if names is None or slot.name in names]
        self._mine = shares(slots, engine.world)[engine.rank]
        self._steps: list[dict[str, Tensor]] = []

    def add(self) -> None:
        """Keep the gradients of a step that has just ended, with nothing in flight."""
        kept = {}
        for slot in self._mine:
            grad = slot.parameter.grad
            if grad is not None and slot.unit is not None and slot.unit.row.codec in self._exact:
                kept[slot.name] = as_real(grad.detach()).clone()
        self._steps.append(kept)

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def measure(self, engine: EngineView, specs: Sequence[str]) -> Errors:
        """The errors of these codecs, the same on all ranks, which call this together. Drops the gradients."""
        texts = list(dict.fromkeys(built(spec).text for spec in specs if spec not in ROUNDING))
        place = {slot.name: n for n, slot in enumerate(engine.slots)}
        table = torch.zeros(len(place), len(texts), _ROW, dtype=torch.float64)
        for slot in self._mine:
            steps = [step[slot.name] for step in self._steps if slot.name in step]
            for column, text in enumerate(texts if steps else ()):
                energy, error = codec_error(text, steps, name=slot.name)
                table[place[slot.name], column] = torch.tensor([energy, *astuple(error)], dtype=torch.float64)
            for step in self._steps:
                step.pop(slot.name, None)
        found = engine.groups.gather(table).sum(0)
        # A gradient that was zero in these steps says nothing about the next ones.
        measured = {name: rows for name, rows in zip(place, found.tolist(), strict=True) if rows and rows[0][0]}
        return Errors(
            {name: rows[0][0] for name, rows in measured.items()},
            {
                text: {name: CodecError(*rows[column][1:]) for name, rows in measured.items()}
                for column, text in enumerate(texts)
            },
        )


def shares(slots: Sequence[Slot], world: int) -> list[list[Slot]]:
    """The parameters divided among ranks, such that all have about as many values; the same on every rank."""
    parts: list[list[Slot]] = [[] for _ in range(world)]
    load = [0] * world
    for slot in sorted(slots, key=lambda slot: (-slot.parameter.numel(), slot.index)):
        least = min(range(world), key=lambda rank: (load[rank], rank))
        parts[least].append(slot)
        load[least] += slot.parameter.numel()
    return parts


def codec_error(spec: str, steps: Sequence[Tensor], *, name: str = "grad") -> tuple[float, CodecError]:
    """The energy |sum g|^2 of a parameter's gradients in these steps, and what a codec loses of them as on one rank."""
    states: list[dict[str, Tensor]] | None = None
    total, missing, squares = (torch.zeros_like(steps[0], dtype=torch.float32) for _ in range(3))
    first_energy = first_missing = 0.0
    for at, grad in zip(count(LATE), steps, strict=False):
        run = codecs.lockstep(spec, [[grad]], names=[name], states=states, first_step=at)
        states = run.states
        total += grad
        squares += grad.float().square()
        missing += grad
        missing -= run.outputs[0][0]
        if at == LATE:
            first_energy, first_missing = _energy(grad), _energy(missing)
    energy, lost = _energy(total), _energy(missing)
    one_step = CodecError(
        one_step=_share(first_missing, first_energy),
        with_feedback=_share(lost, energy),
        residual_growth=_share(lost, first_missing) if first_missing else 1.0,
        lost_values=lost_values(missing.square_(), squares),
    )
    return min(energy, torch.finfo(torch.float32).max), one_step


def lost_values(error: Tensor, size: Tensor) -> float:
    """The share of values that are lost, from squared errors and squared sizes; values without either do not count."""
    smallest = _SMALLEST**2
    sums = torch.zeros(2, dtype=torch.float64, device=error.device)
    for part, whole in zip(error.flatten().split(_CHUNK), size.flatten().split(_CHUNK), strict=True):
        counted = (part > smallest) | (whole > smallest)
        share = (part / whole.clamp_min(smallest)).nan_to_num_(nan=1.0).clamp_(max=1.0).mul_(counted)
        sums += torch.stack([share.sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])
    lost, number = sums.tolist()
    return lost / number if number else 0.0


def _energy(tensor: Tensor) -> float:
    value = float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
    return value if value == value else float("inf")


def _share(part: float, whole: float) -> float:
    """`part / whole`, at most `MOST`; a gradient of zero loses nothing if zero arrives."""
    if not part:
        return 0.0
    return min(MOST, part / whole) if whole and part < float("inf") else MOST
