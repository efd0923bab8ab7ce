"""Exchange records: collectives matched across ranks, before and after a trace file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.trace import Span, Trace
from syncline.trace.formats.chrome_read import read_chrome_trace
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.merge.exchanges import match_exchanges


def exchange(rank, start, end, *, unit="w", step=0, name="all-reduce"):
    return Span(rank, "exchange", name, unit, step, start, end, 800)


STRAGGLER = [exchange(0, 10, 90), exchange(1, 50, 90), exchange(2, 30, 95)]


def test_a_record_says_when_each_rank_joined_started_and_ended():
    (found,) = Trace.of(STRAGGLER).exchanges
    assert (found.name, found.unit, found.step, found.last_joined) == ("all-reduce", "w", 0, 50)
    assert found.joined == {0: 10, 1: 50, 2: 30}
    assert found.ended == {0: 90, 1: 90, 2: 95}
    assert [member.started for member in found.members] == [50, 50, 50]
    assert [member.bytes for member in found.members] == [800, 800, 800]
    assert [found.late_rank(member) for member in found.members] == [1, None, 1]


def test_without_comparable_clocks_ranks_are_matched_but_nobody_waits():
    trace = Trace.of(STRAGGLER, split=False)
    assert trace.spans == STRAGGLER
    (found,) = trace.exchanges
    assert len(found.members) == 3
    assert [found.late_rank(member) for member in found.members] == [None, None, None]


def test_repeated_exchanges_are_matched_in_order_and_steps_are_kept_apart():
    spans = [exchange(rank, at + rank, at + 9) for rank in (0, 1) for at in (0, 20)]
    spans += [exchange(rank, 40, 49, step=1) for rank in (0, 1)]
    assert [(one.step, one.joined) for one in Trace.of(spans).exchanges] == [
        (0, {0: 0, 1: 1}),
        (0, {0: 20, 1: 21}),
        (1, {0: 40, 1: 40}),
    ]


def test_a_rank_with_a_wait_alone_has_joined_without_a_transfer():
    wait = Span(1, "wait", "all-reduce", "w", 0, 20, 50)
    (found,) = Trace.of([exchange(0, 50, 90), wait]).exchanges
    (first, second) = found.members
    assert (second.transfer, second.joined, second.started, second.ended, second.bytes) == (None, 20, 50, 50, 0)
    assert found.late_rank(second) == first.rank == 0


def test_blocked_time_of_the_training_thread_is_no_exchange():
    assert Trace.of([Span(0, "wait", "blocked", "", 0, 0, 5)]).exchanges == []


@pytest.mark.parametrize("split", [True, False])
def test_records_come_back_from_a_trace_file(tmp_path, split):
    trace = Trace.of(STRAGGLER, split=split)
    write_chrome_trace(trace, tmp_path / "t.json.gz")
    again = read_chrome_trace(tmp_path / "t.json.gz")
    assert again.exchanges == trace.exchanges


ONE_AFTER_THE_OTHER = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=4)


@given(st.dictionaries(st.tuples(st.integers(0, 3), st.sampled_from("ab")), ONE_AFTER_THE_OTHER))
def test_split_spans_are_matched_to_the_same_records(ranks):
    spans = []
    for (rank, unit), rows in ranks.items():
        at = 0
        for gap, length in rows:
            spans.append(exchange(rank, at + gap, at + gap + length, unit=unit))
            at += gap + length
    once, exchanges = match_exchanges(spans)
    assert sum(span.end - span.start for span in once) == sum(span.end - span.start for span in spans)
    assert sum(len(one.members) for one in exchanges) == len(spans)
    for split in (True, False):
        again, found = match_exchanges(once, split=split)
        assert again == once
        assert sorted(found, key=repr) == sorted(exchanges, key=repr)
