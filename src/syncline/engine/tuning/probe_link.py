"""Probes between two steps: what the link carries, and what codecs cost here. All ranks probe together."""

import statistics
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline import codecs, exchange
from syncline.codecs import Mean
from syncline.codecs.build import LATE
from syncline.engine.launch.batches import Course, Where, cells_of
from syncline.exchange import AllGather, AllReduce, Link, Place
from syncline.plan.costs import CodecCost, Curve
from syncline.sim import fit

_SIZES = (1 << 14, 1 << 17, 1 << 19)
"""Values of the messages that are timed, float32."""
_TAPPED = 1 << 18
"""Values of the message by which a running job's link is watched."""
_REPEATS = 3
_TIMED = 2


def link_samples(link: Link, device: torch.device) -> list[tuple[float, float]]:
    """(bytes that a rank sends, seconds) of plain all-reduces, one after the other; the first of a size warms up."""
    samples = []
    for count in _SIZES:
        tensor = torch.zeros(count, device=device)
        sent = 2 * (link.place.world - 1) * 4 * count / link.place.world
        took = []
        for number in range(_TIMED + 1):
            begin = _now(device)
            link.ask(Mean(tensor))
            seconds = _now(device) - begin
            if number:
                took.append(seconds)
        samples.append((sent, statistics.median(took)))
    return samples


def dense_seconds(link: Link, device: torch.device, total: int) -> float:
    """What a plain all-reduce of `total` bytes takes, judged by messages of 1 MiB."""
    tensor = torch.zeros(_TAPPED, device=device)
    took = []
    for _ in range(_TIMED + 1):
        begin = _now(device)
        link.ask(Mean(tensor))
        took.append(_now(device) - begin)
    # The first warms up (an idle shaper lets it pass too fast); what disturbs the others can only add to them.
    return min(took[1:]) * total / tensor.nbytes


def line_of(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bytes a second."""
    network = fit(list(samples))
    return network.latency, network.bytes_per_s


def codec_cost(spec: str, shapes: Sequence[tuple[int, ...]], world: int, device: torch.device) -> CodecCost:
    """Encode, between and decode of a codec on gradients of these shapes, without a network."""
    codec = codecs.build(spec)
    carrier = exchange.build(exchange.legal(codec)[0])
    points: dict[str, list[tuple[float, float]]] = {"encode": [], "between": [], "decode": []}
    issues: list[list[float]] = []
    # Numbers of its own: the job's random state belongs to its dropout.
    numbers = torch.Generator(device=device).manual_seed(0)
    for shape in shapes:
        values = torch.Size(shape).numel()
        times: list[tuple[float, float, float]] = []
        state: list[dict[str, Tensor]] | None = None
        issues.append([])
        for step in range(_REPEATS):
            grad = torch.randn(shape, device=device, generator=numbers) * 1e-2
            one, state = _one(codec, carrier, grad, Where(LATE + step, 0, world, 0), device, state)
            times.append(one)
            if device.type == "cuda":
                issues[-1].append(_issue(codec, carrier, grad, Where(LATE + step, 0, world, 0), state))
        for key, column in zip(points, zip(*times[1:], strict=True), strict=True):
            points[key].append((float(values), statistics.median(column)))
    curves = (Curve.through(points[key]) for key in ("encode", "between", "decode"))
    return CodecCost(*curves, issue=statistics.median(min(took, default=0.0) for took in issues))


def _issue(codec: Any, carrier: Any, grad: Tensor, where: Where, state: Any) -> float:
    """Seconds of the host alone: nobody waits for the device, which has nothing else to do."""
    begin = _now(grad.device)
    _one(codec, carrier, grad, where, torch.device("cpu"), state)
    return time.perf_counter() - begin


def _one(
    codec: Any, carrier: Any, grad: Tensor, where: Where, device: torch.device, state: Any
) -> tuple[tuple[float, float, float], list[dict[str, Tensor]]]:
    (cells,) = cells_of(codec, ["probe"], [tuple(grad.shape)], 1)
    course, world = Course(cells, where), where.world
    stages: list[float] = []
    begin = _now(device)
    requests = course.start([grad], state or [{} for _ in cells])
    place = Place(0, world, world)
    while requests:
        opened = [_open(carrier.moves(request, place)) for request in requests]
        stages.append(_now(device) - begin)
        # Here the network would be.
        begin = _now(device)
        answers = [_finish(moves, op, world) for moves, op in opened]
        requests = course.resume(answers)
    stages.append(_now(device) - begin)
    kept = [dict(result.state) for result in course.results if result is not None]
    return (stages[0], sum(stages[1:-1]), stages[-1]), kept


def _open(moves: Generator[Any, Any, Any]) -> tuple[Generator[Any, Any, Any], Any]:
    return moves, next(moves)


def _finish(moves: Generator[Any, Any, Any], op: Any, world: int) -> Any:
    while True:
        got: Any
        if isinstance(op, AllReduce):
            got = op.tensor
        elif isinstance(op, AllGather):
            got = [op.buffer] * world
        else:
            raise AssertionError("probes run over the default exchanges")
        try:
            op = moves.send(got)
        except StopIteration as end:
            return end.value


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
