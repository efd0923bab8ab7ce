"""The replay of recorded spans on traces made by hand, whose answers are known exactly."""

import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.sim.replay.what_if import Replay
from syncline.trace import Span, Trace
from syncline.trace.formats.load import import_files
from syncline.trace.record.postprocess import DDP_TAIL, finish_spans
from syncline.trace.span import BLOCKED

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"
MS = 1_000_000


class Timing:
    """Spans in ms; a step's training thread is laid out piece by piece."""

    def __init__(self):
        self.spans = []

    def add(self, rank, lane, step, start, end, unit="", name="", size=0):
        name = name or ("all-reduce" if lane == "exchange" else lane)
        self.spans.append(Span(rank, lane, name, unit, step, round(start * MS), round(end * MS), size))

    def merged(self):
        return Trace.of(self.spans)


def barrier(steps=8, delays=(0.0, 40.0), sizes=(1000,), latency=0.0, rate=125.0):
    """Forward 10, backward 20 and a delay in forward, then exchanges one after the other, update 2 ms."""
    made, at = Timing(), 0.0
    for step in range(steps):
        ready = [at + 30 + delay for delay in delays]
        for rank, delay in enumerate(delays):
            made.add(rank, "forward", step, at, at + 10 + delay)
            made.add(rank, "backward", step, at + 10 + delay, ready[rank])
        now = max(ready)
        for number, size in enumerate(sizes):
            end = now + latency + size / rate
            for rank, came in enumerate(ready):
                made.add(rank, "exchange", step, came if not number else now, end, f"u{number}", size=size)
            now = end
        for rank in range(len(delays)):
            made.add(rank, "update", step, now, now + 2)
            made.add(rank, "step", step, at, now + 2)
        at = now + 2
    return made.merged()


def overlapped(steps=8, late=40.0):
    """An engine's: the exchange of 30 ms runs behind the next step; rank 1 spends `late` on data, which hides it."""
    made, joined, at = Timing(), {}, {0: 0.0, 1: 0.0}
    for step in range(steps):
        ready = {}
        for rank, data in ((0, 0.0), (1, late)):
            start = at[rank]
            now = start + data
            if data:
                made.add(rank, "data", step, start, now)
            done = joined.get(step - 1, -99.0) + 31
            if done > now:
                made.add(rank, "wait", step, now, done, name="blocked")
                now = done
            made.add(rank, "forward", step, now, now + 10)
            made.add(rank, "backward", step, now + 10, now + 30)
            made.add(rank, "update", step, now + 30, now + 30)
            ready[rank] = now + 30
            made.add(rank, "step", step, start, now + 30)
            at[rank] = now + 30
        joined[step] = max(ready.values())
        for rank in (0, 1):
            made.add(rank, "exchange", step, ready[rank], joined[step] + 30, "u", size=3000)
            made.add(rank, "update", step, joined[step] + 30, joined[step] + 31, "u")
    return made.merged()


def medians(spans, *questions, first=1):
    replay = Replay(spans, first=first)
    assert replay.same.median == pytest.approx(replay.measured.median)
    assert replay.error == pytest.approx(0, abs=1e-6)
    return [round(replay.ask(what).steps.median, 6) for what in questions]


def test_a_straggler_before_a_barrier():
    spans = barrier()
    assert Replay(spans, first=1).measured.median == 80
    got = medians(spans, "no-straggler", "infinite-network", "2x", "bandwidth=0.5x", "perfect-overlap")
    assert got == [40, 72, 76, 88, 72]
    answer = Replay(spans, first=1).ask("no-straggler")
    assert answer.gain_ms == 40
    assert "rank 1 is 40.0 ms per step slower in forward" in answer.says


def test_latency_is_not_bandwidth():
    # 2 + 8 and 2 + 4 ms: the bytes' 12 ms are halved, the latencies stay.
    spans = barrier(delays=(0.0, 0.0), sizes=(1000, 500), latency=2.0)
    assert medians(spans, "2x", "4x", "infinite-network", "no-straggler") == [42, 39, 32, 48]


def test_a_delay_in_some_steps_is_removed_too():
    usual, slow = barrier(steps=9, delays=(0.0, 0.0)), barrier(steps=9)
    replay = Replay(slow, first=1)
    assert replay.ask("no-straggler").steps.mean == pytest.approx(Replay(usual, first=1).measured.mean)
    made, at = Timing(), 0.0
    for step in range(12):
        delay = 60.0 if step % 4 == 3 else 0.0
        for rank in (0, 1):
            own = delay if rank else 0.0
            made.add(rank, "forward", step, at, at + 10 + own)
            made.add(rank, "exchange", step, at + 10 + own, at + 15 + delay, "u", size=10)
            made.add(rank, "step", step, at, at + 15 + delay)
        at += 15 + delay
    replay = Replay(made.merged(), first=1)
    assert replay.measured.mean > 29
    assert replay.ask("no-straggler").steps.mean == pytest.approx(15)


def test_of_three_ranks_the_median_one_is_typical():
    assert medians(barrier(delays=(0.0, 5.0, 40.0)), "no-straggler") == [45]


def test_an_exchange_that_a_late_rank_hid_becomes_visible():
    spans = overlapped()
    replay = Replay(spans, first=2)
    assert not replay.graph.barrier
    assert replay.measured.median == 70
    # 10 + 20 ms of compute, and the exchange of 30 with its update of 1, which the late data had hidden.
    assert medians(spans, "no-straggler", "infinite-network", "perfect-overlap", first=2) == [61, 70, 70]


def test_an_exposed_exchange_of_the_engine():
    spans = overlapped(late=0.0)
    assert Replay(spans, first=2).measured.median == 61
    assert medians(spans, "infinite-network", "2x", "3x", "perfect-overlap", first=2) == [31, 46, 41, 30]


def test_ddps_wait_for_its_buckets_ends_with_them_also_where_buffers_are_sent():
    made = Timing()
    for step, rank in product(range(8), (0, 1)):
        at = 62.0 * step
        made.add(rank, "step", step, at, at + 62)
        made.add(rank, "exchange", step, at, at + 1, "buffers", size=10)
        made.add(rank, "wait", step, at, at + 1, name=BLOCKED)
        made.add(rank, "forward", step, at + 1, at + 10)
        made.add(rank, "backward", step, at + 10, at + 30)
        made.add(rank, "exchange", step, at + 30, at + 58, "bucket 0", size=3000)
        made.add(rank, "backward", step, at + 30, at + 60, name=DDP_TAIL)
        made.add(rank, "update", step, at + 60, at + 62)
    spans = Trace.of(finish_spans(made.spans, sampled=False))
    assert medians(spans, "infinite-network") == [62 - 1 - 28]


def test_overlapping_exchanges_share_the_network():
    made, at = Timing(), 0.0
    for step in range(6):
        for rank in (0, 1):
            made.add(rank, "backward", step, at, at + 10)
            # Both launched within the backward pass; the second has the wire from 12 to 20.
            made.add(rank, "exchange", step, at + 2, at + 12, "a", size=1000)
            made.add(rank, "exchange", step, at + 6, at + 20, "b", size=800)
            made.add(rank, "update", step, at + 20, at + 21)
            made.add(rank, "step", step, at, at + 21)
        at += 21
    replay = Replay(made.merged(), first=1)
    assert replay.error == pytest.approx(0, abs=1e-6)
    assert replay.ask("2x").steps.median == 12, "a from 2 to 7, b from 7 to 11, update"
    assert replay.ask("infinite-network").steps.median == 11


def test_a_trace_that_cannot_be_replayed_says_so():
    with pytest.raises(UsageError, match="no steps"):
        Replay(Trace.of([Span(0, "exchange", "x", "u", 0, 0, 5)], split=False), first=0)
    with pytest.raises(UsageError, match="no compute"):
        Replay(Trace.of([Span(0, "step", "step", "", step, step, step + 1) for step in range(9)], split=False), first=0)
    with pytest.raises(UsageError, match="2 steady steps"):
        Replay(barrier(steps=3), first=1)
    with pytest.raises(UsageError, match="did you mean 'no-straggler'"):
        Replay(barrier(), first=1).ask("no-stragler")
    with pytest.raises(UsageError, match="above 0"):
        Replay(barrier(), first=1).ask("0x")
    for odd in ("1.2.3x", ".x", "x", "1ex", "\u0663x"):
        with pytest.raises(UsageError, match="unknown question"):
            Replay(barrier(), first=1).ask(odd)
    for far in ("1e999x", "1e-300x"):
        with pytest.raises(UsageError, match="name a factor"):
            Replay(barrier(), first=1).ask(far)
    assert Replay(barrier(), first=1).ask("bandwidth=2.x").says == Replay(barrier(), first=1).ask("20e-1X").says


def test_times_since_the_epoch_are_replayed_exactly():
    shifted = [replace(s, start=s.start + (1 << 60) + 1, end=s.end + (1 << 60) + 1) for s in barrier().spans]
    assert medians(Trace.of(shifted), "no-straggler", "2x") == [40, 76]


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_traces_of_torch_profiler_are_replayed(kind):
    found = import_files([FIXTURES / f"{kind}-rank{rank}.json.gz" for rank in (0, 1)])
    trace = Trace.of([s for mine in found.spans.values() for s in mine])
    replay = Replay(trace, first=min(s.step for s in trace.spans if s.lane == "step"))
    assert replay.ranks == 2
    assert replay.same.median == pytest.approx(replay.measured.median, rel=0.02)
    none, double, half = (replay.ask(what).steps.median for what in ("infinite-network", "2x", "0.5x"))
    assert none <= double <= replay.same.median <= half
    assert none < half


def test_one_rank_has_nothing_to_gain():
    made = Timing()
    for step in range(5):
        made.add(0, "forward", step, 10 * step, 10 * step + 8)
        made.add(0, "step", step, 10 * step, 10 * step + 10)
    assert medians(made.merged(), "no-straggler", "infinite-network", "2x", "perfect-overlap") == [10, 10, 10, 10]


def test_tens_of_thousands_of_spans_take_a_second_or_two():
    spans = barrier(steps=150, delays=(0.0, 1.0, 2.0, 3.0), sizes=(100,) * 40)
    assert len(spans.spans) > 20_000
    begin = time.process_time()
    replay = Replay(spans, first=1)
    for what in ("no-straggler", "infinite-network", "2x", "perfect-overlap"):
        replay.ask(what)
    assert time.process_time() - begin < 10, "about 0.8 s on an idle core"
