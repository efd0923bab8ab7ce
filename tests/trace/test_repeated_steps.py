"""Steps of traces without marks, found by repeated work."""

import random
from itertools import pairwise

import pytest

from syncline.trace.formats.repeated_steps import Event, repeated_steps


def loop(steps, *, layers=6, optimizer=True, logged=0, seed=0):
    """The ops of a training thread, which waits for the backward pass; and the bounds of its steps."""
    numbers = random.Random(seed)
    events, bounds, at = [], [], 0
    for step in range(steps):
        begin = at
        names = ["aten::to", "aten::embedding", *["aten::linear", "aten::relu", "aten::add"] * layers, "aten::nll_loss"]
        names += ["wait"] + ["aten::item"] * bool(logged and step % logged == 0)
        names += (
            ["Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"] if optimizer else ["aten::_foreach_add_"]
        )
        for name in names:
            length = numbers.randrange(10, 14) * (5 * layers if name == "wait" else 1)
            if name != "wait":
                events.append(Event(at, at + length, name))
            at += length + 1
        bounds.append((begin, at))
    return events, bounds


@pytest.mark.parametrize("layers", [1, 6, 48])
@pytest.mark.parametrize("logged", [0, 3])
@pytest.mark.parametrize("steps", [2, 3, 20])
def test_steps_without_an_optimizer_range_start_with_their_first_op(steps, layers, logged):
    events, bounds = loop(steps, layers=layers, optimizer=False, logged=logged)
    found = repeated_steps(events)
    assert found[:-1] == bounds[:-1]
    assert found[-1] == (bounds[-1][0], events[-1].end)


@pytest.mark.parametrize("layers", [1, 48])
@pytest.mark.parametrize("steps", [2, 20])
def test_steps_end_with_the_optimizer(steps, layers):
    events, _ = loop(steps, layers=layers)
    found = repeated_steps(events)
    stepped = [event.end for event in events if event.name.startswith("Optimizer.step")]
    assert len(found) == steps
    assert all(start <= end <= until for (start, until), end in zip(found, stepped, strict=True))
    assert all(before[1] == after[0] for before, after in pairwise(found))


def test_a_trace_that_starts_and_ends_inside_a_step_has_the_whole_ones():
    events, bounds = loop(8, optimizer=False)
    found = repeated_steps(events[9:-9])
    assert 6 <= len(found) <= 7
    lengths = {end - start for start, end in bounds}
    assert all(min(lengths) * 0.9 <= end - start <= max(lengths) * 1.1 for start, end in found)


@pytest.mark.parametrize("events", [[], loop(1)[0], loop(1, layers=48, optimizer=False)[0]])
def test_one_step_or_none_is_not_split(events):
    assert repeated_steps(events) == []


def test_work_without_structure_is_not_split():
    numbers = random.Random(1)
    events = [Event(10 * i, 10 * i + 9, f"op {numbers.randrange(200)}") for i in range(500)]
    assert repeated_steps(events) == []
