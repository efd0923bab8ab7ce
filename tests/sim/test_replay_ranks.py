"""The replay against measurements: real ranks, with and without the straggler that a what-if removes."""

import pytest
import replay_ranks

from ranks import run_ranks
from syncline.sim.replay.what_if import Replay
from syncline.trace import Trace

pytestmark = pytest.mark.alone

DELAY_S, STEPS, WARM = 0.04, 14, 8
ATTEMPTS = 4


def measured(strategy):
    """Replays of the same job: plain, with a late rank, plain again."""
    delays = [0.0] * (WARM + STEPS) + [DELAY_S] * STEPS + [0.0] * STEPS
    spans = replay_ranks.merged(run_ranks(replay_ranks.train, 2, strategy, delays, 1))
    made = []
    for number in range(3):
        first = WARM + number * STEPS
        # The first of a stretch is still held up by what came before it.
        made.append(
            Replay(Trace.of([s for s in spans if first <= s.step < first + STEPS], split=False), first=first + 2)
        )
    return made


@pytest.mark.parametrize("strategy", ["ddp", "syncline(none)"])
def test_the_replay_predicts_the_step_without_the_straggler(strategy):
    """Other programs on this machine may disturb one attempt, and show in the two plain stretches."""
    seen = []
    for _ in range(ATTEMPTS):
        before, late, after = measured(strategy)
        for replay in (before, late, after):
            assert replay.same.median == pytest.approx(replay.measured.median, rel=0.01)
        truth = (before.measured.median + after.measured.median) / 2
        answer = late.ask("no-straggler")
        off = answer.steps.median / truth - 1
        errors = [abs(replay.error) for replay in (before, late, after)]
        seen.append((round(off, 3), [round(error, 3) for error in errors]))
        if abs(off) < 0.2 and max(errors) < 0.1:
            assert answer.gain_ms > DELAY_S / 2 * 1e3
            assert "rank 1" in answer.says
            assert "forward" in answer.says
            assert late.ask("infinite-network").steps.median > DELAY_S * 1e3, "a late rank is no network"
            return
    raise AssertionError(f"no attempt came within 20% of the truth and 10% of replay: {seen}")
