"""The partition of a step into phases, and waits that are split off exchanges."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.trace import LANES, PHASES, Span, Trace, partition, shares
from syncline.trace.span import ISSUING


def span(lane, start, end, *, rank=0, name="x", unit="", step=0):
    return Span(rank, lane, name, unit, step, start, end)


def test_compute_hides_an_exchange_and_the_rest_is_exposed():
    spans = [span("step", 0, 100), span("data", 0, 10), span("forward", 10, 30), span("backward", 30, 60)]
    spans += [span("exchange", 40, 80), span("update", 80, 95)]
    assert partition(spans)[0] == {
        "data": 10, "forward": 20, "backward": 30, "exposed_encode": 0, "exposed_exchange": 20, "wait": 0,
        "update": 15, "between": 0, "other": 5,
    }  # fmt: skip


def test_exchange_before_the_last_rank_has_joined_is_a_wait():
    early = [span("step", 0, 100), span("exchange", 10, 60)]
    late = [span("step", 0, 100, rank=1), span("forward", 0, 50, rank=1), span("exchange", 50, 60, rank=1)]
    cut = Trace.of(early + late).spans
    mine = partition([s for s in cut if s.rank == 0])[0]
    assert (mine["wait"], mine["exposed_exchange"]) == (40, 10)
    theirs = partition([s for s in cut if s.rank == 1])[0]
    assert (theirs["wait"], theirs["exposed_exchange"]) == (0, 10)


def test_a_transfer_of_one_unit_wins_over_the_wait_for_another():
    spans = [span("step", 0, 10), span("exchange", 0, 10, unit="a"), span("exchange", 0, 10, unit="b")]
    spans += [span("exchange", 8, 10, unit="b", rank=1)]
    mine = partition([s for s in Trace.of(spans).spans if s.rank == 0])[0]
    assert (mine["wait"], mine["exposed_exchange"]) == (0, 10)


def test_time_in_which_the_thread_issues_messages_is_exposed_exchange():
    spans = [span("step", 0, 100), span("backward", 0, 30), span("backward", 50, 60)]
    spans += [span("wait", 30, 50, name=ISSUING), span("wait", 60, 90, name=ISSUING), span("exchange", 35, 55)]
    spans += [span("exchange", 70, 80, unit="b"), span("exchange", 80, 85, unit="b", rank=1)]
    trace = Trace.of(spans)
    assert {(one.unit, *sorted(one.joined)) for one in trace.exchanges} == {("", 0), ("b", 0, 1)}
    mine = partition([s for s in trace.spans if s.rank == 0])[0]
    # The thread has work while another rank is late: it does not wait for that rank.
    assert (mine["backward"], mine["exposed_exchange"], mine["wait"], mine["other"]) == (40, 50, 0, 10)


def test_repeated_exchanges_of_a_step_are_matched_in_order():
    spans = []
    for rank in (0, 1):
        spans += [span("exchange", 0, 10, rank=rank, unit="b"), span("exchange", 50, 60, rank=rank, unit="b")]
    assert Trace.of(spans).spans == spans, "both phases of a step have a bucket 0; neither waits for the other"


def test_a_rank_that_joined_after_the_end_was_not_waited_for():
    spans = [span("exchange", 0, 10), span("exchange", 20, 30, rank=1), span("exchange", 4, 10, rank=2)]
    cut = Trace.of(spans).spans
    assert [(s.lane, s.start, s.end) for s in cut if s.rank == 0] == [("wait", 0, 4), ("exchange", 4, 10)]


def _reference(spans, begin, end):
    """Nanosecond by nanosecond, from the definition."""
    order = ["forward", "backward", "update", "data", "between", "encode", "decode", "exchange", "wait"]
    phase = {"encode": "exposed_encode", "decode": "exposed_encode", "exchange": "exposed_exchange"}
    totals = dict.fromkeys(PHASES, 0)
    for time in range(begin, end):
        active = {s.lane for s in spans if s.start <= time < s.end}
        lane = next((lane for lane in order if lane in active), "other")
        totals[phase.get(lane, lane)] += 1
    return totals


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(-5, 45), st.integers(0, 30)), max_size=12))
def test_partition_equals_a_nanosecond_by_nanosecond_reference(items):
    spans = [span(lane, start, start + length) for lane, start, length in items]
    result = partition([span("step", 0, 40), *spans])[0]
    assert result == _reference(spans, 0, 40)
    assert sum(result.values()) == 40


def test_shares_sum_to_one():
    generator = random.Random(0)
    steps = {i: {phase: generator.randrange(1000) for phase in PHASES} for i in range(5)}
    assert sum(shares(steps).values()) == pytest.approx(1)


def test_an_exchange_that_ends_in_the_next_step_is_exposed_there():
    spans = [
        Span(0, "step", "step", "", 0, 0, 100), Span(0, "step", "step", "", 1, 100, 200),
        Span(0, "backward", "backward", "", 0, 0, 90), Span(0, "exchange", "allreduce", "fc", 0, 80, 130),
        Span(0, "forward", "forward", "", 1, 120, 200),
    ]  # fmt: skip
    both = partition(spans)
    assert (both[0]["backward"], both[0]["exposed_exchange"]) == (90, 10)
    assert (both[1]["exposed_exchange"], both[1]["forward"], both[1]["other"]) == (20, 80, 0)
