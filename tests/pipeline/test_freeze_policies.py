"""Freeze policies against PipeTransformer's tables and Egeria's rule; the freeze state and its accuracy guard."""

import json
import math

import pytest
import torch

from syncline.errors import UsageError
from syncline.pipeline.freeze import FREEZE_POLICIES, FreezeState, Measured, Progress, advance, start
from syncline.pipeline.freeze.measure import change, similarities
from syncline.pipeline.freeze.policies import gradnorm, needs_of, plasticity, schedule
from syncline.pipeline.freeze.state import parse

TABLES = {
    1 / 5: [0, 3, 5, 6, 8, 9, 9, 10, 10, 11],
    1 / 4: [0, 3, 6, 7, 9, 10, 10, 11, 11, 12],
    1 / 3: [0, 4, 7, 9, 10, 11, 11, 12],
    1 / 2: [0, 6, 9, 11, 12],
}


@pytest.mark.parametrize("alpha", TABLES)
def test_the_schedule_is_pipetransformers(alpha):
    assert [schedule(Progress(t, 12, 0), alpha=alpha) for t in range(len(TABLES[alpha]))] == TABLES[alpha]
    state, frozen = start(f"schedule(alpha={alpha})", blocks=12), [0]
    for step in range(1, len(TABLES[alpha])):
        state = advance(state, Measured(), step=step)
        frozen.append(state.frozen)
    assert frozen == TABLES[alpha]
    changes = [(change.step, change.frozen) for change in state.history]
    assert changes == [(t, n) for t, n in enumerate(frozen) if t and n != frozen[t - 1]]


def test_the_first_epochs_and_the_last_blocks_can_be_left_out():
    late = [schedule(Progress(t, 12, 0), alpha=1 / 2, after=2, keep=2) for t in range(8)]
    assert late == [0, 0, 0, 6, 9, 10, 10, 10]
    at_once = [schedule(Progress(t, 8, 0), alpha=0.9, after=3, keep=1) for t in range(6)]
    assert at_once == [0, 0, 0, 0, 7, 7]
    assert schedule(Progress(5, 2, 0), alpha=0.5, keep=3) == 0, "more blocks stay than there are"
    falling = [12.0 - block for block in range(12)]
    assert gradnorm(Progress(3, 12, 0, falling), alpha=1 / 2, after=2, keep=8) == 4


@pytest.mark.parametrize("depth", [1, 2, 7, 24, 48])
def test_the_schedule_works_for_any_depth(depth):
    frozen = [schedule(Progress(t, depth, 0), alpha=1 / 3) for t in range(40)]
    assert frozen[0] == 0
    assert frozen == sorted(frozen)
    assert frozen[-1] == depth
    assert frozen[1] == math.ceil(depth / 3)


def test_gradnorm_freezes_up_to_the_smallest_norm_and_never_past_the_schedule():
    def frozen(norms, epoch=1, before=0):
        return gradnorm(Progress(epoch, 12, before, norms), alpha=1 / 3)

    falling = [float(12 - n) for n in range(12)]
    assert frozen(falling) == 4, "the schedule's bound"
    assert frozen([3, 1, *([5] * 10)]) == 1
    assert frozen([0, *falling[1:]], epoch=3) == 0
    assert frozen([0, 0, 4, 1, *([5] * 8)], epoch=3, before=2) == 3, "frozen blocks have no gradient"
    assert frozen(None, before=2) == 2, "without gradients it waits"


def test_plasticity_freezes_the_first_blocks_that_stopped_changing():
    moving, slow = [1.0, 0.9, 0.8, 0.7], [1.0, 0.5, 0.1, 0.1]
    rows = list(zip(slow, slow, moving, slow, strict=True))

    def frozen(rows, before=0, **options):
        return plasticity(Progress(9, 4, before, None, rows), **options)

    assert frozen(rows) == 2, "the third block still moves, so the fourth may not freeze"
    assert frozen(rows[:3]) == 0, "one slow epoch is not enough"
    assert frozen(rows[:3], patience=1) == 2
    assert frozen(rows, tolerance=0.05) == 0
    assert frozen(rows, tolerance=0.8) == 4
    assert frozen([], before=1) == 1
    still = [[0.0, 0.0, *row[2:]] for row in rows]
    assert frozen(still, before=2) == 2, "frozen blocks do not change"


def test_plasticity_measures_egerias_similarity():
    torch.manual_seed(0)
    now, before = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    expected = 0.0
    rows = []
    for activations in (now, before):
        flat = activations.reshape(5, 12).double()
        matrix = [[float(flat[i] @ flat[j]) for j in range(5)] for i in range(5)]
        rows.append([[value / math.hypot(*row) for value in row] for row in matrix])
    expected = sum((rows[0][i][j] - rows[1][i][j]) ** 2 for i in range(5) for j in range(5)) / 25
    (found,) = change(similarities([now]), similarities([before]))
    assert found == pytest.approx(expected, rel=1e-5)
    assert change(similarities([now]), similarities([2 * now])) == [pytest.approx(0, abs=1e-12)], "scale does not count"


def test_the_guard_unfreezes_and_pauses_when_the_held_out_loss_regresses():
    state = start("schedule(alpha=0.5, guard=0.1)", blocks=8)
    for loss in (1.0, 0.8):
        state = advance(state, Measured(held_out_loss=loss))
    assert (state.frozen, state.best_frozen, state.best_loss) == (6, 4, 0.8)
    tolerated = advance(state, Measured(held_out_loss=0.87))
    assert tolerated.frozen == 7, "within the guard's limit"
    back = advance(tolerated, Measured(held_out_loss=0.9), step=7)
    assert (back.frozen, back.clock, back.pause) == (4, 1, 1)
    assert back.history[-1].why == "held-out loss 0.9, best 0.8"
    assert back.history[-1].step == 7
    paused = advance(back, Measured(held_out_loss=0.85))
    assert (paused.frozen, paused.pause) == (4, 0)
    again = advance(paused, Measured(held_out_loss=0.85))
    assert again.frozen == 6, "it freezes again from where it was"
    second = advance(again, Measured(held_out_loss=math.nan))
    assert (second.frozen, second.pause) == (4, 2), "a loss that is not a number is a regression; the pause doubles"
    assert advance(start("schedule", blocks=8), Measured(held_out_loss=math.nan)).best_loss is None
    unguarded = advance(start("schedule(alpha=0.5, guard=0)", blocks=8), Measured(held_out_loss=1.0))
    assert advance(unguarded, Measured(held_out_loss=9.0)).frozen == 6


def test_the_state_is_json_and_back():
    state = start("gradnorm(alpha=0.5, guard=0.1)", blocks=4)
    for norms, loss in (([4, 3, 1, 2], 0.1 + 0.2), ([4, 3, 1, 2], 5.0)):
        state = advance(state, Measured(norms=norms, changes=[0.1] * 4, held_out_loss=loss), step=3)
    assert state.history
    same = FreezeState.from_json(json.loads(json.dumps(state.to_json())))
    assert same == state
    assert advance(same, Measured(norms=[1, 2, 3, 4])) == advance(state, Measured(norms=[1, 2, 3, 4]))
    for broken in ({}, {"policy": "none", "blocks": 2, "frozen": 3}, {**state.to_json(), "other": 1}):
        with pytest.raises(UsageError, match="not a freeze state"):
            FreezeState.from_json(broken)


def every_second(progress, *, first: int = 1):
    """A user's own policy."""
    return first + progress.epoch // 2


def five_thirds(progress):
    """A policy that returns something else than a number of blocks, and needs two epochs of measurements."""
    assert progress.epoch, "called before an epoch ended"
    return 5 / 3


def test_a_users_function_is_a_policy():
    state, frozen = start("test_freeze_policies:every_second(first=2)", blocks=4), []
    for _ in range(5):
        state = advance(state, Measured())
        frozen.append(state.frozen)
    assert frozen == [2, 3, 3, 4, 4]
    with pytest.raises(UsageError, match=r"returned 1\.66.*return a number of blocks"):
        advance(start("test_freeze_policies:five_thirds", blocks=4), Measured())
    assert needs_of("test_freeze_policies:every_second") == ("norms",)
    assert (needs_of("schedule"), needs_of("plasticity")) == ((), ("changes",))


def test_common_options_go_with_every_policy():
    for name in FREEZE_POLICIES.names():
        settings = parse(f"{name}(blocks=encoder.layers, every=20, guard=0.1)")
        assert (settings.policy, settings.blocks, settings.every, settings.guard) == (name, "encoder.layers", 20, 0.1)
    assert parse("schedule(0.3)").policy == "schedule(0.3)"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("schedul", "did you mean 'schedule'"),
        ("schedule(alpha=2)", "alpha is 2"),
        ("schedule(after=-1)", "use 0 or more epochs"),
        ("gradnorm(keep=-1)", "use 0 or more epochs and blocks"),
        ("schedule(a=1)", "takes"),
        ("schedule(every=-1)", "0 or more"),
        ("schedule(every=many)", "every takes a whole number"),
        ("plasticity(patience=0)", "patience 1 or more"),
        ("schedule | none", "one name is expected"),
        ("test_freeze_policies:every_second(last=2)", "takes"),
    ],
)
def test_wrong_policies_are_usage_errors(policy, message):
    with pytest.raises(UsageError, match=message):
        start(policy, blocks=4)


def test_a_model_without_blocks_is_a_usage_error():
    with pytest.raises(UsageError, match="no blocks"):
        start("schedule", blocks=0)
