"""Probes of codecs between two steps: seconds to encode, between messages, and to decode. All ranks probe together.

On a GPU a codec runs alone, without a network. On the CPU its wall time alone would say little, because the codec and
compute slow each other down. So it runs over a real exchange while the training thread computes, CPU seconds of its
thread are counted, and `stretch` (wall seconds per CPU second while every rank computes) turns them into wall seconds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncline import codecs, exchange
from syncline.codecs import Codec, Request, Result
from syncline.codecs.build import LATE
from syncline.engine.launch.batches import CodecBatch, launch_batches
from syncline.engine.launch.bf16_buffers import Bf16Buffers
from syncline.engine.launch.capture import Tape
from syncline.engine.launch.reused_memory import ReusedMemory
from syncline.engine.launch.run import LaunchRun
from syncline.engine.launch.units import StepContext
from syncline.engine.tuning.probe_link import synchronized_time
from syncline.exchange import AllGather, AllReduce, Exchange, Handle, Link, Position
from syncline.plan.costs import CodecCost, Curve

States = list[dict[str, Tensor]]
StageSeconds = tuple[float, float, float]
"""Seconds until the first message is ready, between messages, and after the last message has arrived."""
Run = Callable[[Sequence[CodecBatch], StepContext, Tensor, States], tuple[StageSeconds, States]]
"""Runs a codec's batches once on a gradient: its stages, and its next state."""


def cost_alone(spec: str, shapes: Sequence[tuple[int, ...]], *, world: int, device: torch.device) -> CodecCost:
    """A codec on gradients of these shapes, without a network; `issue` is the host's time for one run on a GPU."""
    codec = codecs.build(spec)
    pattern = exchange.build(exchange.legal(codec)[0])
    issues: dict[torch.Size, list[float]] = {}

    def launch(request: Request) -> _Loopback:
        return _Loopback(pattern, request, world)

    def run(
        batches: Sequence[CodecBatch], context: StepContext, grad: Tensor, states: States
    ) -> tuple[StageSeconds, States]:
        seconds, states = _run(batches, context, launch, grad, states, lambda: synchronized_time(device))
        if device.type == "cuda":
            # Once more without waiting for the device, which has nothing else to do.
            begin = synchronized_time(device)
            _run(batches, context, launch, grad, states, time.perf_counter)
            issues.setdefault(grad.shape, []).append(time.perf_counter() - begin)
        return seconds, states

    curves = _curves(codec, shapes, run, rank=0, world=world, device=device, repeats=3)
    issue = statistics.median(map(min, issues.values())) if issues else 0.0
    return CodecCost(*curves, issue=issue)


def cost_captured(
    spec: str, shapes: Sequence[tuple[int, ...]], *, world: int, device: torch.device, tape: Tape
) -> CodecCost:
    """Like `cost_alone`, for launches that replay captures; `tape` captures for the current stream."""
    codec = codecs.build(spec)
    pattern = exchange.build(exchange.legal(codec)[0])
    issues: list[float] = []

    def launch(request: Request) -> _Loopback:
        return _Loopback(pattern, request, world)

    def run(
        batches: Sequence[CodecBatch], context: StepContext, grad: Tensor, states: States
    ) -> tuple[StageSeconds, States]:
        clock = partial(synchronized_time, device)
        seconds, after = _run(batches, context, launch, grad, states, clock)
        if not states[0]:  # libraries set themselves up in this run
            return seconds, after
        seconds, issue = _replayed(_capture(batches, context, launch, grad, states, tape), clock)
        issues.append(issue)
        return seconds, after

    curves = _curves(codec, shapes, run, rank=0, world=world, device=device, repeats=3)
    return CodecCost(*curves, issue=statistics.median(issues))


def _capture(
    batches: Sequence[CodecBatch],
    context: StepContext,
    launch: Callable[[Request], "_Loopback"],
    grad: Tensor,
    states: States,
    tape: Tape,
) -> list[Callable[[], None]]:
    """A codec's stages, captured one by one."""
    launch_run = LaunchRun(batches, context, deliver=lambda place, result: None)
    handles: list[_Loopback] = []

    def stage() -> None:
        if handles:
            answers = [handle.wait() for handle in handles]
            requests = launch_run.resume(answers)
        else:
            requests = launch_run.start([grad], states)
        handles[:] = [launch(request) for request in requests]

    stages = [tape.capture(stage)]
    while handles:
        stages.append(tape.capture(stage))
    return stages


def _replayed(stages: Sequence[Callable[[], None]], clock: Callable[[], float]) -> tuple[StageSeconds, float]:
    """The seconds of the stages, and the host's to issue them."""
    spent, issue = [], 0.0
    for replay in stages:
        begin = clock()
        replay()
        issue += time.perf_counter() - begin
        spent.append(clock() - begin)
    return (spent[0], sum(spent[1:-1]), spent[-1]), issue


def cost_over_link(spec: str, link: Link, shapes: Sequence[tuple[int, ...]], *, rank: int, stretch: float) -> CodecCost:
    """A codec over a real exchange on gradients of these shapes; run it in `while_computing`."""
    buffers = Bf16Buffers() if str(link.exchange) == "allreduce" else None
    memory = ReusedMemory()

    def run(
        batches: Sequence[CodecBatch], context: StepContext, grad: Tensor, states: States
    ) -> tuple[StageSeconds, States]:
        return _run(batches, context, link.launch, grad, states, time.thread_time, buffers=buffers, memory=memory)

    cpu, world = torch.device("cpu"), link.position.world
    curves = _curves(codecs.build(spec), shapes, run, rank=rank, world=world, device=cpu, repeats=4)
    return CodecCost(*(Curve(stretch * curve.fixed, stretch * curve.each) for curve in curves))


def _curves(
    codec: Codec,
    shapes: Sequence[tuple[int, ...]],
    run: Run,
    *,
    rank: int,
    world: int,
    device: torch.device,
    repeats: int,
) -> list[Curve]:
    """Seconds by number of values for each stage: medians over the runs on each shape; the first run warms up."""
    points: list[list[tuple[float, float]]] = [[], [], []]
    # Its own random numbers: those of the job must not change.
    numbers = torch.Generator(device=device).manual_seed(rank)
    for shape in shapes:
        (batches,) = launch_batches(codec, ["probe"], [shape], 1)
        states: States = [{} for _ in batches]
        rows = []
        for step in range(repeats):
            grad = torch.randn(shape, device=device, generator=numbers) * 1e-2
            context = StepContext(LATE + step, rank, world, 0)
            seconds, states = run(batches, context, grad, states)
            rows.append(seconds)
        for column, line in zip(zip(*rows[1:], strict=True), points, strict=True):
            line.append((float(torch.Size(shape).numel()), statistics.median(column)))
    return [Curve.through(line) for line in points]


class _Loopback:
    """Like `exchange.Handle`, as rank 0 without a network: its own messages stand in for those of other ranks."""

    def __init__(self, pattern: Exchange, request: Request, world: int) -> None:
        self._moves = pattern.moves(request, Position(0, world, world))
        self._world, self._op = world, next(self._moves)

    def advance(self) -> bool:
        return True

    def wait(self) -> Any:
        while True:
            if isinstance(self._op, AllReduce):
                received: Any = self._op.tensor
            else:
                assert isinstance(self._op, AllGather), "probes run over the default exchanges"
                received = [self._op.buffer] * self._world
            try:
                self._op = self._moves.send(received)
            except StopIteration as end:
                return end.value


def _run(
    batches: Sequence[CodecBatch],
    context: StepContext,
    launch: Callable[[Request], "Handle | _Loopback"],
    grad: Tensor,
    states: States,
    clock: Callable[[], float],
    *,
    buffers: Bf16Buffers | None = None,
    memory: ReusedMemory | None = None,
) -> tuple[StageSeconds, States]:
    """Run a codec once over launched exchanges; the time of messages on the network is left out."""
    spent: list[float] = []
    after: States = [{} for _ in batches]

    def keep(place: int, result: Result) -> None:
        after[place] = dict(result.state)

    launch_run = LaunchRun(batches, context, buffers=buffers, deliver=keep, memory=memory)
    begin = clock()
    requests = launch_run.start([grad], states)
    while requests:
        handles = [launch(request) for request in requests]
        spent.append(clock() - begin)
        begin = clock()
        answers: list[Any] = []
        for handle in handles:
            while not handle.advance():
                now = clock()
                spent.append(now - begin)
                begin = now
            answers.append(handle.wait())
        requests = launch_run.resume(answers)
    spent.append(clock() - begin)
    return (spent[0], sum(spent[1:-1]), spent[-1]), after
