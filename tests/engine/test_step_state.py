"""The phases of a step: every transition of a training loop, and errors for those that cannot happen."""

from collections.abc import Callable

import pytest

from syncline.engine.step_state import Phase, StepState

TRANSITIONS: dict[str, Callable[[StepState], object]] = {
    "begin_backward": StepState.begin_backward,
    "end_backward": StepState.end_backward,
    "settle": StepState.settle,
    "begin_step": StepState.begin_step,
    "abort_step": StepState.abort_step,
    "end_step": StepState.end_step,
    "whole_step": StepState.whole_step,
    "close": StepState.close,
}

# transition: phase before to phase after; every other phase before is an error
ALLOWED: dict[str, dict[Phase, Phase]] = {
    "begin_backward": {Phase.IDLE: Phase.BACKWARD, Phase.AVERAGED: Phase.BACKWARD},
    "end_backward": {Phase.BACKWARD: Phase.EXCHANGING},
    "settle": {phase: phase for phase in Phase} | {Phase.EXCHANGING: Phase.AVERAGED, Phase.UPDATING: Phase.IDLE},
    "begin_step": dict.fromkeys((Phase.IDLE, Phase.EXCHANGING, Phase.AVERAGED, Phase.UPDATING), Phase.STEPPING),
    "abort_step": {Phase.STEPPING: Phase.IDLE},
    "end_step": {Phase.STEPPING: Phase.UPDATING},
    "whole_step": {
        Phase.IDLE: Phase.IDLE,
        Phase.EXCHANGING: Phase.UPDATING,
        Phase.AVERAGED: Phase.IDLE,
        Phase.UPDATING: Phase.UPDATING,
        Phase.CLOSED: Phase.CLOSED,
    },
    "close": dict.fromkeys(Phase, Phase.CLOSED),
}


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_is_allowed_or_an_error(name: str, before: Phase) -> None:
    state = StepState()
    state.phase = before
    if before in ALLOWED[name]:
        TRANSITIONS[name](state)
        assert state.phase is ALLOWED[name][before]
    else:
        with pytest.raises(AssertionError, match=before.name):
            TRANSITIONS[name](state)
        assert state.phase is before


def test_a_step_with_two_optimizers_is_counted_once() -> None:
    state = StepState()
    state.begin_backward()
    state.end_backward()
    assert state.in_flight
    state.begin_step()
    assert state.end_step()
    state.begin_step()
    assert not state.end_step()
    assert state.in_flight
    state.settle()
    assert state.phase is Phase.IDLE
    assert not state.whole_step()


def test_a_step_after_a_wait_is_counted() -> None:
    state = StepState()
    for _ in range(2):  # accumulated over two exchanges
        state.begin_backward()
        state.end_backward()
        state.settle()
    assert state.phase is Phase.AVERAGED
    assert state.whole_step()
    assert not state.whole_step()


def test_a_step_that_raises_can_be_repeated() -> None:
    state = StepState()
    state.begin_backward()
    state.end_backward()
    state.begin_step()
    state.abort_step()
    assert state.phase is Phase.EXCHANGING
    state.begin_step()
    assert state.end_step()
