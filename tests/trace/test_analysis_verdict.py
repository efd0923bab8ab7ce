"""Each cause on a trace made by hand, and no cause where there is none. Real ranks: `bench/test_bench_causes.py`."""

from itertools import product

import pytest
from analysis_spans import span, steps

from syncline.trace import Trace
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.verdict import verdict
from syncline.trace.span import ISSUING

COUNT = 12
BYTES = 1_000_000


def run(*ranks, jitter=lambda step: 0.0, count=COUNT, **metadata):
    return analyze(Trace.of(steps(count, *ranks, jitter=jitter), metadata=metadata))


def rank(*, data=0, forward=20, backward=40, update=4, exchange=((1, "w", 1000),), idle=0):
    return [
        ("data", data), ("forward", forward), ("backward", backward),
        *(("exchange", *each) for each in exchange), ("update", update), ("idle", idle),
    ]  # fmt: skip


def usage(world, cpu_ms, delay_ms, *, cores, count=COUNT):
    rows = [[step, round(cpu_ms * 1e6), round(delay_ms * 1e6)] for step in range(count)]
    return {
        "hosts": {str(r): "a" for r in range(world)},
        "cores": {"a": cores},
        "usage": {str(r): rows for r in range(world)},
    }


def test_compute_hides_everything_that_is_there():
    told = run(rank(), rank())
    assert told.verdict.kind == "fine"
    assert "above the bound of 64.0 ms that compute sets" in told.verdict.sentence


def test_a_single_rank_is_compute_bound():
    told = run(rank(exchange=(), idle=2))
    assert told.verdict.kind == "compute-bound"
    assert told.verdict.recoverable_ms is None
    assert "forward 20.0 ms, backward 40.0 ms" in told.verdict.sentence


def test_a_straggler_is_named_with_its_phase_and_what_it_costs():
    told = run(rank(), rank(data=30, forward=19), rank(forward=21))
    assert told.verdict.kind == "straggler"
    assert told.verdict.sentence.startswith("Rank 1 is late, delayed in data loading (30.0 ms there, the others 0.0")
    assert told.verdict.recoverable_ms == pytest.approx(28), "then rank 2 is the last, 1 ms after rank 0"


def test_a_rank_slow_in_two_phases_is_named_with_both():
    told = run(rank(), rank(forward=40, backward=70))
    assert "delayed in backward and forward (110.0 ms there, the others 60.0 ms)" in told.verdict.sentence
    assert told.verdict.recoverable_ms == pytest.approx(50)


def test_ranks_that_wait_in_turn_are_no_stragglers():
    turns = []
    for late in (0, 1, 0, 1, 0, 1, 1, 0, 1, 0):
        turns.append([rank(forward=50 if late == r else 20) for r in (0, 1)])
    spans = []
    for number, pair in enumerate(turns):
        made = steps(1, *pair)
        shift = number * 200_000_000
        spans += [
            type(s)(s.rank, s.lane, s.name, s.unit, number, s.start + shift, s.end + shift, s.bytes) for s in made
        ]
    told = analyze(Trace.of(spans))
    assert told.verdict.kind == "unclear"
    assert "none is always late" in told.verdict.sentence
    assert told.verdict.recoverable_ms == pytest.approx(30, rel=0.1), "each wait is 30 ms, of one of the two"


def test_slow_loaders_on_all_ranks_are_input_bound():
    told = run(rank(data=50), rank(data=52))
    assert told.verdict.kind == "input-bound"
    assert told.verdict.recoverable_ms == pytest.approx(50)


def test_exposed_bytes_are_bandwidth_bound():
    told = run(*[rank(exchange=((80, "w", BYTES),))] * 2, bandwidth=100_000_000)
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(80)
    assert "1 MB per step in 1 message over a link of 100 Mbit/s, 100 Mbit/s while they move" in told.verdict.sentence


def test_sizes_separate_latency_from_bytes():
    # 2 ms each, and 80 ms a megabyte.
    sizes = [1000, 500, 2000, 40_000, 300_000, 1000, 1000, 800, 600, 900, 700, 1100]
    exchange = tuple((2 + 80e-6 * size, f"w{i}", size) for i, size in enumerate(sizes))
    told = run(*[rank(exchange=exchange)] * 2)
    assert told.network.known == "fitted"
    assert told.network.latency_ms == pytest.approx(2, rel=0.01)
    assert told.network.bits == pytest.approx(100e6, rel=0.01)
    found = {finding.kind: finding.recoverable_ms for finding in told.findings}
    assert found["latency-bound"] == pytest.approx(2 * 11, rel=0.02), "one message is left"
    assert found["bandwidth-bound"] == pytest.approx(80e-6 * sum(sizes), rel=0.02)


def test_many_small_messages_are_latency_bound():
    told = run(*[rank(exchange=tuple((0.2, f"w{i}", 64) for i in range(300)))] * 2)
    assert told.verdict.kind == "latency-bound"
    assert told.verdict.recoverable_ms == pytest.approx(300 * 0.2, rel=0.05)


def at_once(ends, *, compute=20.0, count=COUNT):
    """Two ranks that launch all messages together after their compute: (end in ms after that, bytes) of each."""
    last = compute + max(end for end, _ in ends)
    spans = []
    for step in range(count):
        at = step * (last + 2)
        for who in (0, 1):
            mine = {"rank": who, "step": step}
            spans += [span("step", at, at + last + 2, **mine), span("backward", at, at + compute, **mine)]
            spans += [
                span("exchange", at + compute, at + compute + end, name="all-reduce", unit=f"w{i}", size=size, **mine)
                for i, (end, size) in enumerate(ends)
            ]
            spans.append(span("update", at + last, at + last + 2, **mine))
    return spans


@pytest.mark.parametrize("metadata", [{}, {"bandwidth": 100_000_000}], ids=["link unknown", "link known"])
@pytest.mark.parametrize("ends", [((160, BYTES), (720, 8 * BYTES)), ((720, BYTES), (640, 8 * BYTES))])
def test_messages_that_share_the_network_are_not_slow(ends, metadata):
    # 9 MB need 720 ms at 100 Mbit/s, whichever of the two ends first.
    told = analyze(Trace.of(at_once(ends), metadata=metadata))
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(720, rel=0.1)
    assert "latency-bound" not in [finding.kind for finding in told.findings]
    assert told.verdict.sentence.endswith("100 Mbit/s while they move, 0% hidden.")


def test_many_small_messages_launched_all_at_once_are_latency_bound():
    told = analyze(Trace.of(at_once([(0.2 * (i + 1), 64) for i in range(500)])))
    assert told.verdict.kind == "latency-bound"
    assert told.verdict.recoverable_ms == pytest.approx(100, rel=0.1)


def test_the_thread_that_issues_many_messages_is_part_of_their_cost():
    spans = []
    for step, who in product(range(COUNT), (0, 1)):
        at, mine = step * 45.0, {"rank": who, "step": step}
        spans += [span("step", at, at + 45, **mine), span("forward", at, at + 5, **mine)]
        for number in range(100):
            begin = at + 5 + 0.4 * number
            spans.append(span("backward", begin, begin + 0.1, **mine))
            spans.append(span("wait", begin + 0.1, begin + 0.4, name=ISSUING, **mine))
            spans.append(
                span("exchange", begin + 0.2, begin + 0.3, name="all-reduce", unit=f"w{number}", size=4, **mine)
            )
    told = analyze(Trace.of(spans))
    assert told.verdict.kind == "latency-bound"
    assert told.verdict.recoverable_ms == pytest.approx(0.3 * 99, rel=0.03), "one message is left"
    assert "0.30 ms each, 0.30 ms of it to pack, start and unpack it" in told.verdict.sentence
    assert told.breakdown_ms["backward"] == pytest.approx(10)


def test_a_transfer_that_ends_later_on_one_rank_costs_the_others_a_wait():
    told = run(*[rank(exchange=((first, "a", BYTES), (10, "b", BYTES))) for first in (40, 60)])
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(70), "the step is 134 ms, of which 64 are compute"
    assert told.verdict.sentence.endswith("10.0 ms of it are waits for ranks where transfers end later.")
    late = run(
        rank(exchange=((40, "a", BYTES), (10, "b", BYTES))),
        rank(backward=60, exchange=((40, "a", BYTES), (10, "b", BYTES))),
    )
    found = {finding.kind: finding.recoverable_ms for finding in late.findings}
    assert found == pytest.approx({"bandwidth-bound": 50, "straggler": 20}), "a wait for compute is not the network's"


def test_an_oversubscribed_host_comes_before_what_it_causes():
    told = run(*[rank(exchange=((30, "w", BYTES),))] * 4, **usage(4, 30, 25, cores=1))
    assert told.verdict.kind == "oversubscribed"
    assert (
        "its 4 ranks on 1 core: a training thread is ready to run but has no core for 25.0 ms" in told.verdict.sentence
    )
    assert told.verdict.recoverable_ms == pytest.approx(25 + 30 * 3 / 4)
    shaped = run(*[rank(exchange=((120, "w", BYTES),))] * 4, **usage(4, 30, 25, cores=1), bandwidth=100_000_000)
    assert shaped.verdict.kind == "bandwidth-bound", "1.5 MB need 120 ms on that link, whatever the cores do"
    others = run(*[rank()] * 2, **usage(2, 20, 25, cores=2))
    assert "Other programs take the cores" in others.verdict.sentence
    on_gpu = run(*[rank()] * 2, **usage(2, 20, 25, cores=2), backend="nccl")
    assert on_gpu.verdict.kind != "oversubscribed", "the host runs ahead of its GPU, which is never idle"


def test_cores_taken_by_other_programs_rank_by_their_cost():
    ranks = (rank(), rank(forward=73))
    busy = run(*ranks, **usage(2, 20, 43, cores=2))
    assert [finding.kind for finding in busy.findings] == ["straggler", "oversubscribed"]
    assert busy.verdict.recoverable_ms == pytest.approx(53)
    assert busy.findings[1].sentence.startswith("Other programs take the cores")
    busier = run(*ranks, **usage(2, 20, 60, cores=2))
    assert [finding.kind for finding in busier.findings] == ["oversubscribed", "straggler"]
    own = run(*ranks, **usage(2, 60, 43, cores=1))
    assert own.verdict.kind == "oversubscribed", "their own crowd may be why one is late"
    assert own.verdict.sentence.startswith("The host has too few cores")


@pytest.mark.parametrize(
    "metadata",
    [
        {"usage": 3, "cores": [], "hosts": "x"},
        {"usage": {"0": [[1, 2], "x", [0, None, 3]], "1": 7}, "cores": {"a": "two"}, "hosts": {"0": 5}},
        {"bandwidth": "fast", "world_size": "many", "strategy": 4, "backend": []},
        {"bandwidth": -1, "usage": {"0": [[10**30, -5, 2]]}},
    ],
)
def test_invalid_metadata_is_ignored(metadata):
    told = run(rank(), rank(), **metadata)
    assert told.verdict.kind == "fine"
    assert told.world_size == 2
    assert told.strategy is None


def test_exposed_compression_is_named():
    made = [("forward", 20), ("backward", 30), ("encode", 20, "w", 0), ("exchange", 1, "w", 1000), ("update", 4)]
    told = run(made, made)
    assert told.verdict.kind == "compute-bound"
    assert "encoding and decoding that no compute hides" in told.verdict.sentence
    assert told.verdict.recoverable_ms == pytest.approx(20)


def test_too_few_steps_and_too_much_noise_are_unclear():
    few = run(rank(data=50), rank(data=50), count=3)
    assert few.verdict.kind == "unclear"
    assert few.verdict.sentence == "Too few steps to tell: 2 steady steps, at least 3 are needed."
    made = []
    for step, exposed in enumerate([1, 0, 1, 0, 90, 1, 0, 30]):
        one = steps(1, *[rank(exchange=((exposed, "w", BYTES),))] * 2)
        shift = step * 500_000_000
        made += [
            type(s)(s.rank, s.lane, s.name, s.unit, step + 7, s.start + shift, s.end + shift, s.bytes) for s in one
        ]
    told = analyze(Trace.of(made, split=False))
    assert told.verdict.kind == "unclear"
    assert "vary too much" in told.verdict.sentence


def test_time_in_no_lane_is_reported():
    told = run(
        [("forward", 20), ("exchange", 1, "w", 1000), ("idle", 79)],
        [("forward", 20), ("exchange", 1, "w", 1000), ("idle", 79)],
    )
    assert told.verdict.kind == "unclear"
    assert "79.0 ms of a step of 100.0 ms (79%) are in no recorded lane" in told.verdict.sentence


def test_a_user_can_add_a_cause():
    told = run(rank(), rank())
    facts = Facts((0, 1), 10, 11, 100.0, 1100.0, {}, (), None, told.bound, told.startup)
    findings = [
        Finding("moon", "It is full.", 9.0),
        Finding("tide", "It is high.", 30.0),
        Finding("dust", "Some.", 1.0),
    ]
    chosen, found = verdict(facts, [lambda _, made=made: made for made in findings])
    assert chosen.kind == "tide"
    assert [finding.kind for finding in found] == ["tide", "moon"], "the costliest first, trifles left out"
