"""Ranks from separate files: process groups, step numbers and clocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from syncline.trace import Span, Trace, analyze
from syncline.trace.formats.align_rank_files import align
from syncline.trace.formats.trace_file import RankTrace
from syncline.trace.span import group_label

MS, STEPS, STEP_MS = 1_000_000, 6, 100


def trace(rank, *, host="a", first_step=0, offset_ms=0.0, delay_ms=0.0, group="", sequence=None, absolute=True):
    """A rank whose steps take 100 ms, with an all-reduce that ends 60 ms after the start, `delay_ms` later."""
    spans, sequences = [], {}
    for number in range(STEPS):
        at = round((number * STEP_MS + offset_ms) * MS)
        step = first_step + number
        begin, end = at + round((40 + delay_ms) * MS), at + round((60 + delay_ms) * MS)
        spans += [
            Span(rank, "step", "step", "", step, at, at + STEP_MS * MS),
            Span(rank, "forward", "forward", "", step, at, at + 30 * MS),
            Span(rank, "exchange", "all-reduce", "collective 0", step, begin, end, 1000, group),
        ]
        if sequence is not None:
            sequences[begin, end, group] = sequence + number
    return RankTrace(Path(f"rank{rank}.json"), rank, spans, host=host, absolute=absolute, sequences=sequences)


def exchanges(traces):
    merged = Trace.of(span for one in traces for span in one.spans)
    return {tuple(exchange.joined) for exchange in merged.exchanges}


def starts(one):
    return [span.start for span in one.spans if span.lane == "step"]


@pytest.mark.parametrize("named", [True, False], ids=["with names", "as Gloo, without"])
def test_collectives_of_two_process_groups_on_one_host_move_no_clock(named):
    pairs = [group_label("1", [0, 1]), group_label("2", [2, 3])] if named else ["", ""]
    traces = [trace(rank, delay_ms=39 * (rank // 2), group=pairs[rank // 2]) for rank in range(4)]
    before = [starts(one) for one in traces]
    notes, aligned = align(traces)
    assert [starts(one) for one in traces] == before
    assert (notes, aligned) == (["ranks 0-3 ran on host a: its clock was taken as it is"], True)
    assert exchanges(traces) == {(0, 1), (2, 3)}
    assert analyze(Trace.of(span for one in traces for span in one.spans)).late == ()


def test_a_pair_of_ranks_on_another_host_is_moved_together_by_collectives_that_both_hosts_share():
    world = [trace(rank, host="ab"[rank // 2], offset_ms=250.0 * (rank // 2)) for rank in range(4)]
    # Inside each pair there is another collective, at another time.
    for one, pair in zip(world, ([0, 1], [0, 1], [2, 3], [2, 3]), strict=True):
        more = [replace(s, group=group_label("x", pair), start=s.end, end=s.end + MS) for s in one.spans if s.unit]
        one.spans += more
    notes, aligned = align(world)
    assert aligned
    assert (
        notes[0]
        == "the clock of ranks 2-3 was set back by 250.000 ms: 12 collectives end that far apart, within 0.000 ms"
    )
    assert {tuple(starts(one)) for one in world} == {tuple(starts(world[0]))}


def test_ranks_that_count_their_steps_differently_are_matched_by_time_on_one_host():
    traces = [trace(0), trace(1, first_step=2, delay_ms=5.0)]
    notes, aligned = align(traces)
    assert aligned
    assert notes[0] == "rank 1 numbers the steps of rank 0 +2: it was renumbered"
    assert starts(traces[0]) == starts(traces[1])
    assert [span.step for span in traces[1].spans if span.lane == "step"] == list(range(STEPS))
    assert exchanges(traces) == {(0, 1)}


def test_sequence_numbers_match_collectives_of_ranks_that_count_steps_differently():
    traces = [trace(0, sequence=7), trace(1, host="b", first_step=2, offset_ms=3.0, sequence=7)]
    notes, aligned = align(traces)
    assert aligned
    assert notes == ["the clock of rank 1 was set back by 3.000 ms: 6 collectives end that far apart, within 0.000 ms"]
    merged = Trace.of(span for one in traces for span in one.spans)
    assert [exchange.joined.keys() for exchange in merged.exchanges] == [{0, 1}] * STEPS


def test_clocks_that_agree_are_left_alone_and_a_clock_that_is_behind_is_set_forward():
    notes, _ = align([trace(0), trace(1, host="b", offset_ms=0.002), trace(2, host="c", offset_ms=-4.0)])
    assert notes == [
        "the clock of rank 1 was taken as it is: 6 collectives end at the same time on all hosts",
        "the clock of rank 2 was set forward by 4.001 ms: 6 collectives end that far apart, within 0.000 ms",
    ]


def test_without_a_common_collective_clocks_are_not_comparable():
    traces = [trace(0, group="x"), trace(1, host="b", group="y")]
    notes, aligned = align(traces)
    assert not aligned
    assert notes == ["rank 1: too few collectives with rank 0 and its like to compare their clocks"]


def test_a_host_called_localhost_may_be_any_host():
    notes, _ = align([trace(rank, host="localhost", offset_ms=70.0 * rank) for rank in (0, 1)])
    assert notes[0].startswith("the clock of rank 1 was set back by 70.000 ms")
