"""A launch on its way: encode, exchange (as often as its codec asks), decode, and what is kept of it.

The executors drive `carry`: on the CPU in worker threads, on CUDA by putting everything on side streams at once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from syncline.codecs.ops import finite
from syncline.engine.launch.batches import Course
from syncline.engine.launch.units import Launch
from syncline.trace import Recorder

Turn = Callable[[Launch, int], AbstractContextManager[None]]


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
