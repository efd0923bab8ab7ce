"""The analysis of traces made by hand, with exact expected figures."""

import doctest
import json
import sys

import pytest
from analysis_spans import MS, span, steps
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.trace import LANES, PHASES, Span, Trace, partition
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.network import fit
from syncline.trace.analysis.startup import first_steady
from syncline.trace.analysis.timeline import timeline
from syncline.trace.intervals import covered

ORDER = ("forward", "backward", "update", "data", "between", "encode", "decode", "exchange", "wait")
NAMES = {"encode": "exposed_encode", "decode": "exposed_encode", "exchange": "exposed_exchange"}

PIECES = st.lists(st.tuples(st.sampled_from(LANES), st.integers(-5, 130), st.integers(0, 40)), max_size=20)
EDGES = st.lists(st.integers(0, 120), min_size=2, max_size=8, unique=True)


def rasterised(spans, begin, end):
    """Phases and what is visible of each span, nanosecond by nanosecond, from the definition."""
    totals, exposed = dict.fromkeys(PHASES, 0), [0.0] * len(spans)
    for time in range(begin, end):
        active = [i for i, s in enumerate(spans) if s.start <= time < s.end]
        lane = next((lane for lane in ORDER if any(spans[i].lane == lane for i in active)), "other")
        totals[NAMES.get(lane, lane)] += 1
        if lane == "exchange":
            moving = [i for i in active if spans[i].lane == "exchange"]
            for i in moving:
                exposed[i] += 1 / len(moving)
        elif lane == "wait":
            exposed[min((i for i in active if spans[i].lane == "wait"), key=lambda i: (spans[i].start, i))] += 1
    return totals, exposed


@given(PIECES, EDGES)
def test_steps_are_partitioned_as_a_rasterised_reference_says(pieces, edges):
    spans = [Span(0, lane, lane, str(i), 0, at, at + long) for i, (lane, at, long) in enumerate(pieces)]
    edges = sorted(edges)
    bounds = list(zip(edges[::2], edges[1::2], strict=False))
    brackets = [Span(0, "step", "step", "", number, *bound) for number, bound in enumerate(bounds)]
    found = partition([*spans, *brackets])
    assert found == {number: rasterised(spans, *bound)[0] for number, bound in enumerate(bounds)}
    assert timeline(spans).exposed == pytest.approx(rasterised(spans, -5, 170)[1])


def test_the_figures_of_a_plain_run():
    # 2 ranks; rank 1 takes 6 ms longer in forward, so that rank 0 waits; 10 ms of bytes, nothing hidden.
    made = [("data", 2), ("forward", 10), ("backward", 20), ("exchange", 10, "w", 1_000_000), ("update", 3)]
    slow = [("data", 2), ("forward", 16), ("backward", 20), ("exchange", 10, "w", 1_000_000), ("update", 3)]
    told = analyze(Trace.of(steps(8, made, slow), metadata={"strategy": "mine", "world_size": 2}))
    assert (told.strategy, told.world_size, told.steps, told.steady_first) == ("mine", 2, tuple(range(8)), 1)
    assert told.step_ms == pytest.approx({"usual": 51, "median": 51, "mean": 51, "p95": 51})
    zero, one = told.ranks
    assert zero.breakdown_ms == pytest.approx(
        {"data": 2, "forward": 10, "backward": 20, "exposed_encode": 0, "exposed_exchange": 10, "wait": 6, "update": 3,
         "between": 0, "other": 0}
    )  # fmt: skip
    assert sum(zero.breakdown.values()) == pytest.approx(1)
    assert one.breakdown_ms["wait"] == 0
    (late,) = told.late
    assert (late.rank, late.share, late.doing) == (1, 1, "forward")
    assert late.wait_ms == pytest.approx(6)
    assert (told.communication, told.compression) == (0, None)
    (unit,) = told.units
    assert (unit.unit, unit.bytes, unit.count, unit.exposed_ms) == ("w", 1_000_000, 1, pytest.approx(10))
    assert (unit.launch_ms, unit.end_ms, unit.wait_ms) == pytest.approx((35, 48, 3)), "the middle of both ranks"
    assert unit.bandwidth_bits == pytest.approx(800e6)
    assert told.bound.compute_ms == pytest.approx(41)
    assert told.bound.wire_ms == pytest.approx(10)
    assert told.bound.distance == pytest.approx(51 / 41 - 1)
    # The path leaves rank 0, which waited, for what rank 1 did.
    path = [(piece.rank, piece.lane, piece.unit, round(piece.ms, 6)) for piece in told.critical_path]
    assert path[:3] == [(1, "data", "", 2), (1, "forward", "", 16), (1, "backward", "", 20)]
    assert [(lane, unit, ms) for _, lane, unit, ms in path[3:]] == [("exchange", "w", 10), ("update", "", 3)]
    assert len(told.per_step) == 16


def test_a_known_link_sets_the_bound():
    made = [("forward", 10), ("backward", 20), ("exchange", 90, "w", 1_000_000), ("update", 3)]
    told = analyze(Trace.of(steps(6, made, made, made, made), metadata={"bandwidth": 200_000_000}))
    assert told.bound.wire_ms == pytest.approx(1.5 * 8 / 200 * 1000), "four ranks: 2(N-1)/N of the bytes"


def test_a_transfer_is_on_the_path_from_where_compute_hid_it():
    spans = []
    for rank in (0, 1):
        spans += [
            span("step", 0, 60, rank=rank),
            span("forward", 0, 10, rank=rank),
            span("backward", 10, 30, rank=rank),
        ]
        spans += [span("exchange", 20, 55, rank=rank, unit="w", size=5), span("update", 55, 60, rank=rank)]
    path = [(piece.lane, piece.ms) for piece in analyze(Trace.of(spans)).critical_path]
    assert path == [("forward", 10), ("backward", 10), ("exchange", 35), ("update", 5)]


def test_overlap_counts_transfers_and_compression():
    spans = [span("step", 0, 40), span("backward", 0, 20), span("encode", 10, 14), span("exchange", 14, 30, unit="w")]
    spans += [span("decode", 30, 34)]
    told = analyze(Trace.of(spans))
    assert (told.communication, told.compression) == (pytest.approx(6 / 16), pytest.approx(4 / 8))


def test_start_up_is_found_in_the_data_with_its_causes():
    spans, at = [], 0.0
    for step in range(14):
        slow = {0: 200, 1: 3, 2: 80}.get(step, 0)
        planning = 40 if step == 4 else 0
        spans += [span("forward", at, at + 10 + slow, step=step)]
        spans += [span("update", at + 10 + slow, at + 12 + slow + planning, step=step)]
        if planning:
            spans += [span("update", at + 20, at + 50, name="replan", step=step)]
        spans += [span("step", at, at + 12 + slow + planning, step=step)]
        at += 12 + slow + planning
    told = analyze(Trace.of(spans))
    assert (told.startup.steps, told.steady_first) == (5, 5), "until the plan was made"
    assert told.startup.extra_ms == pytest.approx(200 + 3 + 80 + 40)
    assert dict(told.startup.causes) == pytest.approx({"forward": 283, "replan": 40})
    assert (told.startup.first_step_ms, told.startup.steady_ms) == pytest.approx((212, 12))
    assert told.verdict.kind == "start-up"


@pytest.mark.parametrize(
    ("series", "place"),
    [
        ([10.0] * 20, 0),
        ([90.0, 10.0, 10.0, 11.0, 10.0, 10.0, 9.0, 10.0], 1),
        ([90.0, 10.0, 300.0, 11.0, 10.0, 10.0, 9.0, 10.0, 10.0, 11.0], 3),
        ([10.0, 10.0, 14.0, 10.0, 10.0, 9.0, 10.0, 10.0], 0),
        ([10.0, 10.0, 10.0, 300.0] * 4, 0),
        ([50.0, 20.0], 0),
        ([], 0),
    ],
)
def test_first_steady_step_of_a_series(series, place):
    assert first_steady(series) == place


def test_steps_can_be_chosen_and_what_reaches_into_them_counts():
    spans = [span("step", 100 * n, 100 * n + 100, step=n) for n in range(5)]
    spans += [span("forward", 100 * n + 30, 100 * n + 100, step=n) for n in range(5)]
    spans += [span("exchange", 100 * n + 90, 100 * n + 120, unit="w", step=n) for n in range(5)]
    told = analyze(Trace.of(spans), steps=(2, 4))
    assert told.steps == (2, 3)
    assert told.ranks[0].breakdown_ms["exposed_exchange"] == pytest.approx(20), "also in step 2, from step 1"
    with pytest.raises(UsageError, match="no steps from 7 to 8"):
        analyze(Trace.of(spans), steps=(7, 9))


def test_missing_content_is_noted():
    made = [span("exchange", 10 * n, 10 * n + 5, name="all-reduce", unit="w", step=n) for n in range(5)]
    told = analyze(Trace.of(made, split=False))
    assert len(told.steps) == 5
    assert any("no spans of whole steps" in note for note in told.notes)
    assert any("no compute" in note for note in told.notes)
    assert (told.bound.bound_ms, told.bound.distance, told.communication) == (None, None, None)
    uneven = [span("step", 0, 9), span("step", 10, 19, step=1), span("step", 0, 9, rank=1)]
    assert any(
        "1 step that not every rank has: left out" in note for note in analyze(Trace.of(uneven, split=False)).notes
    )
    with pytest.raises(UsageError, match="no steps"):
        analyze(Trace.of([], split=False))


def test_a_rank_without_steps_is_an_aggregator_and_can_be_late():
    spans = []
    for n in range(5):
        at = 100 * n
        spans += [span("step", at, at + 100, step=n), span("forward", at, at + 40, step=n)]
        spans += [span("wait", at + 40, at + 90, name="server", unit="w", step=n)]
        spans += [span("exchange", at + 90, at + 100, name="server", unit="w", step=n)]
        spans += [span("exchange", at + 90, at + 100, rank=1, name="server", unit="w", step=n)]
    told = analyze(Trace.of(spans))
    assert [rank.rank for rank in told.ranks] == [0]
    assert told.late[0].rank == 1
    assert told.late[0].wait_ms == pytest.approx(50)


def test_many_steps_are_thinned_in_the_table_only():
    spans = [span("step", n, n + 1, step=n) for n in range(9000)]
    told = analyze(Trace.of(spans))
    assert 2000 < len(told.per_step) <= 4000
    assert any("one in 3 of 9,000 steps" in note for note in told.notes)
    assert len(told.steps) == 9000


def test_the_json_is_plain_and_complete():
    made = [("forward", 10), ("backward", 20), ("exchange", 10, "w", 1000), ("update", 3)]
    told = json.loads(
        json.dumps(analyze(Trace.of(steps(6, made, made), notes=["odd"])).as_json("here"), allow_nan=False)
    )
    assert (told["format"], told["source"], told["notes"]) == ("syncline analysis 1", "here", ["odd"])
    assert told["steps"] == {"first": 0, "last": 5, "count": 6, "steady_first": 1, "usual": 5}
    assert set(told["verdict"]) == {"kind", "sentence", "recoverable_ms"}
    assert set(told["ranks"][0]) == {"rank", "step_ms", "breakdown", "breakdown_ms"}
    assert set(told["exchanges"]) >= {"count_per_step", "bytes_per_step", "wait_ms", "transfer_ms", "late"}
    assert set(told["bound"]) == {"compute_ms", "wire_ms", "bound_ms", "distance"}
    assert sum(told["breakdown"].values()) == pytest.approx(1)
    assert sum(told["breakdown_ms"].values()) == pytest.approx(told["step_ms"]["mean"])


@given(st.floats(0.01, 5), st.floats(1e-5, 1e-2), st.integers(0, 9), st.floats(0, 1e6))
def test_latency_and_bandwidth_are_fitted_despite_an_odd_message(latency, slope, odd, time):
    # Any but the very largest: those decide what a byte costs.
    points = [(1000.0 * 2**power, latency + slope * 1000 * 2**power) for power in range(12)]
    points[odd] = (points[odd][0], time)
    if slope * points[-1][0] > latency:
        assert fit(points) == pytest.approx((latency, slope), rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=10))
def test_covered_time_equals_that_of_a_set(pieces):
    assert covered([(a, a + b) for a, b in pieces]) == len({t for a, b in pieces for t in range(a, a + b)})


@pytest.mark.parametrize("name", ["trace.analysis.network", "stats", "trace.analysis.startup"])
def test_examples(name):
    assert doctest.testmod(sys.modules[f"syncline.{name}"]).failed == 0


def test_times_far_from_zero_stay_exact():
    base = 34_558_390_876_918 * MS
    spans = [Span(0, "step", "step", "", 0, base, base + 7), Span(0, "forward", "f", "", 0, base + 1, base + 3)]
    assert partition(spans)[0]["forward"] == 2


RANDOM = st.builds(
    lambda rank, lane, name, unit, step, start, long, size: Span(
        rank, lane, name, unit, step, start, start + long, size
    ),
    st.integers(0, 2),
    st.sampled_from((*LANES, "step")),
    st.sampled_from(("all-reduce", "blocked", "replan", "")),
    st.sampled_from(("", "w")),
    st.integers(-1, 4),
    st.integers(-(10**16), 10**16) | st.integers(0, 10**8),
    st.integers(0, 10**8),
    st.integers(0, 1 << 62) | st.just(0),
)


@given(st.lists(RANDOM, max_size=30), st.booleans())
def test_no_spans_make_it_crash(spans, split):
    try:
        told = analyze(Trace.of(spans, split=split))
    except UsageError:
        return
    content = json.loads(json.dumps(told.as_json(), allow_nan=False))
    for row in content["ranks"]:
        assert sum(row["breakdown_ms"].values()) == pytest.approx(row["step_ms"]["mean"], rel=1e-9, abs=1e-6)


def test_steps_with_dropped_spans_are_left_out():
    made = steps(8, [("forward", 10), ("update", 2)])
    kept = [s for s in made if s.lane == "step" or s.start > 28 * MS]
    told = analyze(Trace.of(kept, metadata={"recorder": {"dropped": 5}}))
    assert told.steps[0] == 3, "of step 2 the forward pass is missing"
    assert any("dropped 5 spans: steps before 3 are left out" in note for note in told.notes)
    assert analyze(Trace.of(kept)).ranks[0].breakdown_ms["other"] > 0
