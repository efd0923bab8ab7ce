"""A launch on its way: encode, exchange (as often as its codec asks), decode, and what is kept of it.

The executors drive `carry`: on the CPU in worker threads, on CUDA by putting everything on side streams at once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.codecs.ops import finite
from syncline.engine.launch.batches import Cell, Course, Where, rounds_of
from syncline.engine.launch.bf16_buffers import Rounded
from syncline.exchange import Link
from syncline.trace import Recorder

if TYPE_CHECKING:
    from syncline.engine.units import UnitRun

Turn = Callable[["Launch", int], AbstractContextManager[None]]


@dataclass(eq=False)
class Launch:
    """One part of a unit, and what it is doing in the present backward pass."""

    unit: "UnitRun"
    part: int
    cells: Sequence[Cell]
    links: Sequence[Link]
    """One a round: rounds have process groups of their own, so that no round's order depends on another's."""
    position: int = 0
    ready: bool = False
    where: Where = field(default_factory=lambda: Where(0, 0, 1, 0))
    step: int = -1
    """The recorder's step when the backward pass began; a worker may come to it in the next one."""
    tentative: list[dict[str, Tensor]] | None = None
    """The states that the last exchange would leave; committed by the optimizer's step."""
    chain: bool = False
    """Go on from the tentative states: gradients are being accumulated over several exchanges."""
    done: bool = False
    event: Any = None
    measure: bool = False
    """Note this pass's norms, for the sentinel."""
    norms: Tensor | None = None
    """Norms of this rank's gradient and of the averaged one, as they were exchanged."""
    rounded: Rounded = field(default_factory=Rounded)

    def __post_init__(self) -> None:
        self.rounds, self.always = rounds_of(self.cells)
        name = self.unit.row.name
        self.label = f"{name}[{self.part}]" if self.unit.row.partitions > 1 else name

    def commit(self) -> None:
        """Keep what the exchange left."""
        if self.tentative is not None:
            for cell, state in zip(self.cells, self.tentative, strict=True):
                cell.state = state
            self.tentative = None


def carry(launch: Launch, recorder: Recorder, turn: Turn | None) -> None:
    """Take a launch from gradients to averaged gradients; collectives are issued inside `turn(launch, round)`.

    Without turns nothing lies between a codec's work and its exchange, and one mark serves both.
    """
    unit, label, step = launch.unit, launch.label, recorder.step if launch.step < 0 else launch.step
    # Other exchanges sum in float32; and norms are taken of the gradient as it was.
    rounds = all(str(link.exchange) == "allreduce" for link in launch.links) and not launch.measure
    course = Course(launch.cells, launch.where, rounded=launch.rounded if rounds else None)
    chained = launch.tentative if launch.chain else None
    before = [dict(cell.state) for cell in launch.cells] if chained is None else chained
    begin = recorder.mark("encode")
    requests = course.start(unit.grads, before)
    end = recorder.mark("encode")
    recorder.add("encode", "encode", begin, end, unit=label, step=step)
    number = 0
    while requests:
        link = launch.links[number]
        with turn(launch, number) if turn is not None else nullcontext():
            begin = end if turn is None else recorder.mark("exchange")
            handles = [link.launch(request) for request in requests]
        answers = [handle.wait() for handle in handles]
        sent = sum(handle.sent_bytes for handle in handles)
        end = recorder.mark("exchange")
        recorder.add("exchange", str(link.exchange), begin, end, unit=label, bytes=sent, step=step)
        begin = end
        requests = course.resume(answers)
        lane, name = ("encode", "encode") if requests else ("decode", "decode")
        end = recorder.mark(lane)
        recorder.add(lane, name, begin, end, unit=label, step=step)
        number += 1
    _finish(launch, course, before)


def _finish(launch: Launch, course: Course, before: list[dict[str, Tensor]]) -> None:
    unit = launch.unit
    launch.norms = _norms(launch, course) if launch.measure else None
    after: list[dict[str, Tensor]] = []
    for cell, result, old in zip(launch.cells, course.results, before, strict=True):
        assert result is not None
        # Spread reaches every value of a product of factors; a sparsifier's result has only those that it sent.
        product = cell.codec.spread and cell.codec.definition.carries == "factors"
        after.append(_unless_broken(result.output, dict(result.state), old, everywhere=product))
        for place, first, values in cell.outputs(result.output):
            unit.receive(place, first, values)
    launch.tentative = after


def _norms(launch: Launch, course: Course) -> Tensor:
    # Now, for later the user may have scaled or clipped the gradients.
    local = [cell.pack(launch.unit.grads) for cell in launch.cells]
    averaged = [result.output for result in course.results if result is not None]
    return torch.stack([norm(local), norm(averaged)])


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all values together, in float32."""
    parts = [
        torch.linalg.vector_norm(t, dtype=None if t.dtype == torch.float64 else torch.float32).float() for t in tensors
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return total


def _unless_broken(
    output: Tensor, new: dict[str, Tensor], old: dict[str, Tensor], *, everywhere: bool = False
) -> dict[str, Tensor]:
    """The new state if the result is finite on every value, else the old: a broken step leaves residuals untouched.

    The output is the same on every rank, so is the choice. On CUDA it is made on the device. `everywhere`: what is
    not finite is so in every value, and one of them tells.
    """
    if not output.numel() or not (new or "error" in old):
        return new
    good = output[(0,) * output.dim()].isfinite() if everywhere else finite(output)
    if output.device.type == "cpu":
        return new if good else old
    if not new:
        new = {"error": torch.zeros_like(old["error"])}  # paid, unless the step is broken
    return {
        key: torch.where(good, t, old[key].view_as(t) if key in old else torch.zeros_like(t)) for key, t in new.items()
    }
