"""Shares of a run: steps in which the engine still measures are start-up."""

import pytest

from syncline.engine.tuning.tuner import REPLAN
from syncline.trace import Span
from syncline.trace.merge.merge_ranks import Part
from syncline.train.checkpoint.history import History
from syncline.train.rank.record import RankRecord
from syncline.train.session.assemble import rank_row
from syncline.train.strategies import Traffic

HISTORY = History(losses=[1.0])
RECORD = RankRecord(
    part=Part(0, []), node=0, host="here", backend="gloo", startup_ms={}, phases=1, synchronised_bytes=0,
    theory=Traffic(0, 0, 0), spans_dropped=0, first_complete_step=0, history=HISTORY,
)  # fmt: skip
MS = 1_000_000


def _spans(steps, planned_after):
    for step in range(steps):
        at = step * 100 * MS
        yield Span(0, "step", "step", "", step, at, at + 100 * MS)
        yield Span(0, "forward", "forward", "", step, at, at + 50 * MS)
        if step == planned_after:
            yield Span(0, "update", REPLAN, "plan", step, at + 50 * MS, at + 100 * MS)


@pytest.mark.parametrize(("steps", "update"), [(12, 0.0), (7, 0.5 / 6)])
def test_the_step_that_plans_counts_only_where_few_steps_follow(steps, update):
    told = rank_row(RECORD, HISTORY, list(_spans(steps, planned_after=5)), first_complete=0)
    assert told["planned_at"] == [6]
    assert told["breakdown"]["update"] == pytest.approx(update)
    assert sum(told["breakdown"].values()) == pytest.approx(1)
