"""Probes on the CPU: what exchanges and codecs cost while the training thread computes. All ranks probe together.

A codec's wall time alone says little here: compute slows it down, and is slowed down by it. So CPU seconds are counted,
of the thread that does the work, and brought to wall seconds by what a second of CPU takes while every rank computes.
Latencies are those that a busy machine has: a message waits until a thread that can take it gets a core.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncline import codecs
from syncline._compat import NoSubclasses
from syncline.codecs import Mean
from syncline.codecs.build import LATE
from syncline.engine.launch.batches import Course, Where, cells_of
from syncline.engine.launch.bf16_buffers import Rounded
from syncline.exchange import Handle, Link
from syncline.plan.costs import CodecCost, Curve

T = TypeVar("T")

_SIDE = 256
"""Of the matrices that are multiplied meanwhile: about a millisecond each."""
_SMALL, _MESSAGES = 1 << 14, 9
"""Values of the messages that tell the latency, and how many of them are sent."""
_LARGE, _LOOK_S, _MOST = 1 << 18, 0.3, 64
"""Values of the messages that keep the wire busy, for about how long, and how many at most."""
_REPEATS = 4


def beside_compute(work: Callable[[], T]) -> tuple[T, float]:
    """Do `work` in a thread while this one computes: its result, and what was computed a second."""
    found: list[T] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            with torch.no_grad(), NoSubclasses():
                found.append(work())
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=run, name="syncline-probe", daemon=True)
    a, out = torch.full((_SIDE, _SIDE), 1e-3), torch.empty(_SIDE, _SIDE)
    count, begin = 0, time.perf_counter()
    thread.start()
    with torch.no_grad():
        while not count or not over.is_set():
            torch.mm(a, a, out=out)
            count += 1
    rate = count / (time.perf_counter() - begin)
    thread.join()
    if failed:
        raise failed[0]
    return found[0], rate


def busy_latency(link: Link, bytes_per_s: float) -> float:
    """Seconds that an all-reduce takes beside its bytes, as `beside_compute`."""
    tensor = torch.zeros(_SMALL)
    sent = 2 * (link.place.world - 1) * tensor.nbytes / link.place.world
    took = []
    for _ in range(_MESSAGES):
        begin = time.perf_counter()
        link.ask(Mean(tensor))
        took.append(time.perf_counter() - begin)
    return max(0.0, statistics.median(took[1:]) - sent / bytes_per_s)


def drag(link: Link, bytes_per_s: float, meet: Callable[[], None]) -> float:
    """What a second in which the wire is busy takes from compute. `meet` lets the ranks begin together."""
    tensor = torch.zeros(_LARGE)
    sent = 2 * (link.place.world - 1) * tensor.nbytes / link.place.world
    times = int(min(_MOST, max(2, _LOOK_S * bytes_per_s / sent)))

    def busy() -> None:
        for _ in range(times):
            link.ask(Mean(tensor))

    meet()
    _, alone = beside_compute(lambda: time.sleep(_LOOK_S))
    meet()
    _, shared = beside_compute(busy)
    return max(0.0, alone / shared - 1)


def carried_cost(spec: str, link: Link, shapes: Sequence[tuple[int, ...]], *, rank: int, stretch: float) -> CodecCost:
    """A codec over a real exchange on gradients of these shapes: wall seconds of its work, as `beside_compute`."""
    codec, world = codecs.build(spec), link.place.world
    points: list[list[tuple[float, float]]] = [[], [], []]
    # Numbers of its own: the job's random state belongs to its dropout.
    numbers = torch.Generator().manual_seed(rank)
    for shape in shapes:
        (cells,) = cells_of(codec, ["probe"], [shape], 1)
        states: list[dict[str, Tensor]] = [{} for _ in cells]
        rows = []
        rounded = Rounded() if str(link.exchange) == "allreduce" else None
        for step in range(_REPEATS):
            course = Course(cells, Where(LATE + step, rank, world, 0), rounded=rounded)
            grad = torch.randn(shape, generator=numbers) * 1e-2
            rows.append(_stages(course, link, grad, states))
            states = [dict(result.state) for result in course.results if result is not None]
        for column, line in zip(zip(*rows[1:], strict=True), points, strict=True):
            line.append((float(torch.Size(shape).numel()), stretch * statistics.median(column)))
    return CodecCost(*(Curve.through(line) for line in points))


def _stages(
    course: Course, link: Link, grad: Tensor, states: list[dict[str, Tensor]]
) -> tuple[float, float, float]:  # fmt: skip
    """CPU seconds until the first message is out, between messages, and after the last has come."""
    begin = time.thread_time()
    requests = course.start([grad], states)
    spent: list[float] = []
    while requests:
        handles = [link.launch(request) for request in requests]
        spent.append(time.thread_time() - begin)
        begin = time.thread_time()
        answers: list[Any] = []
        for handle in handles:
            begin = _driven(handle, begin, spent)
            answers.append(handle.wait())
        requests = course.resume(answers)
    spent.append(time.thread_time() - begin)
    return spent[0], sum(spent[1:-1]), spent[-1]


def _driven(handle: Handle, begin: float, spent: list[float]) -> float:
    """Drive an exchange; what is done between two of its messages is noted, and what comes after the last is not."""
    while not handle.advance():
        now = time.thread_time()
        spent.append(now - begin)
        begin = now
    return begin
