"""Captured launches do what launches do: the same averages and states, whatever comes between two passes.

CUDA graphs need a GPU (test_engine_gpu.py). Here a tape captures the operators of a function and runs them again.
"""

import pytest
import torch
import torch.distributed as dist
from operator_tape import OperatorTape
from torch import nn

from ranks import run_ranks
from syncline import exchange
from syncline.codecs.algorithms import powersgd
from syncline.engine.launch import capture
from syncline.engine.launch.capture import CapturedLaunch, Captures, why_eager
from syncline.engine.launch.run import run_launch
from syncline.engine.launch.units import Slot, StepContext, UnitRun
from syncline.plan import Unit
from syncline.trace import Recorder

SHAPES = {"a": (24, 16), "b": (24, 16), "c": (40, 8, 2), "d": (24,), "e": (7,)}


def unit_of(spec: str, pattern: str = "allreduce") -> UnitRun:
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    slots = [Slot(name, p, i, p.detach()) for i, (name, p) in enumerate(parameters.items())]
    links = [exchange.connect(pattern, dist.group.WORLD) for _ in range(2)]
    return UnitRun(Unit("all", tuple(SHAPES), spec, pattern, 1), slots, {pattern: links})


def give(unit: UnitRun, rank: int, world: int, step: int) -> None:
    """A backward pass leaves gradients, in new memory."""
    unit.begin()
    numbers = torch.Generator().manual_seed(10 * step + rank)
    unit.grads = [torch.randn(shape, generator=numbers) for shape in SHAPES.values()]
    if step == 4:  # another layout in memory
        unit.grads[0] = unit.grads[0].t().contiguous().t()
        unit.grads[2] = unit.grads[2].mT.contiguous().mT
    unit.targets, unit.takes_memory = [grad.detach() for grad in unit.grads], [False] * len(unit.grads)
    unit.uncommitted = True
    for launch in unit.launches:
        launch.context = StepContext(step, rank, world, 0)


def train_twice(rank: int, world: int, spec: str, lazy: bool) -> None:
    if lazy:  # the average of the matrix that is alone in its batch is computed in its gradient's memory
        powersgd.LAZY["cpu"] = 1
    plain, captured = unit_of(spec), unit_of(spec)
    assert not why_eager(captured.launches[0])
    made, recorder, tape = None, Recorder(rank=rank), OperatorTape()
    for step in range(8):
        for unit in (plain, captured):
            give(unit, rank, world, step)
        run_launch(plain.launches[0], recorder, None)
        if step < 2:
            run_launch(captured.launches[0], recorder, None)
        else:
            if made is None:
                made = CapturedLaunch(captured.launches[0], tape)
            assert made.fits(captured.launches[0])
            tape.overwrite()
            made.run(captured.launches[0], recorder)
        for here, there in zip(plain.targets, captured.targets, strict=True):
            assert torch.equal(here, there), f"step {step}"
        if step != 5:  # a skipped step
            plain.commit()
            captured.commit()
        if step == 6:  # as after a checkpoint: the same values in other memory
            for batch in captured.launches[0].batches:
                batch.state = {key: tensor.clone() for key, tensor in batch.state.items()}
        for a, b in zip(plain.launches[0].batches, captured.launches[0].batches, strict=True):
            assert a.state.keys() == b.state.keys()
            assert all(torch.equal(a.state[key], b.state[key]) for key in a.state), f"step {step}"
    assert tape.captures == 1 + 3 + 2  # the start, three batches after the first message, matrices after the second


@pytest.mark.parametrize(
    ("spec", "lazy"),
    [("powersgd(rank=2)", False), ("powersgd(rank=2)", True), ("powersgd(rank=2) | bf16", True),
     ("powersgd(rank=2) | fp16", False)],
)  # fmt: skip
def test_a_capture_does_what_the_launch_does(spec: str, lazy: bool) -> None:
    run_ranks(train_twice, 2, spec, lazy)


def refuse(rank: int, world: int) -> None:
    reasons = {
        "acpsgd(rank=2)": "acpsgd(rank=2) does not declare that it does the same in every step",
        "warmup(powersgd(rank=2), steps=3)": "does not declare",
        "powersgd(rank=2, feedback=false)": "keeps no residual",
    }
    for spec, reason in reasons.items():
        assert reason in why_eager(unit_of(spec).launches[0]), spec
    assert "allgather is not an all-reduce" in why_eager(unit_of("powersgd(rank=2) | int8", "allgather").launches[0])
    captures = Captures(OperatorTape)
    capture.WARM_UP = 1
    unit = unit_of("powersgd(rank=2)")
    (launch,) = unit.launches
    found = []
    for step, (measure, unused) in enumerate([(False, False)] * 3 + [(True, False), (False, True), (False, False)]):
        captures.begin([launch])
        give(unit, rank, world, step)
        launch.measure = measure
        if unused:
            unit.targets[3] = None
        made = captures.of(launch, 0)
        found.append(made is not None)
        made.run(launch, Recorder(rank=rank)) if made else run_launch(launch, Recorder(rank=rank), None)
        unit.commit()
        assert (launch.norms is not None) == measure
    assert found == [False, False, True, True, False, True]  # the first pass has no states
    assert captures.report() == "1 of 1 launches replay CUDA graphs"
    captures.begin([unit_of("acpsgd(rank=2)").launches[0]])
    assert captures.report().startswith("0 of 1 launches replay CUDA graphs; acpsgd(rank=2) does not")


def test_what_is_not_the_same_in_every_step_is_not_captured() -> None:
    run_ranks(refuse, 2)
