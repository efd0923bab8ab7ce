"""Regression tests: traces made by hand for which an earlier analysis gave a wrong verdict."""

import shutil

import pytest
from analysis_spans import MS, span, steps
from hypothesis import given
from hypothesis import strategies as st
from trace_files import GLOO

from syncline.trace import LANES, Span, Trace
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.network import fit
from syncline.trace.analysis.overlap import overlap
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.formats.load import load
from syncline.trace.record.postprocess import finish_spans

COUNT = 12


def transfers(size, messages, *, exposed=50, world=2, count=COUNT, **metadata):
    made = [("forward", 20), ("backward", 28)]
    made += [("exchange", exposed / messages, f"w{i}", size) for i in range(messages)]
    return analyze(Trace.of(steps(count, *[[*made, ("update", 2)]] * world), metadata=metadata))


@pytest.mark.parametrize("messages", [1, 3, 8])
def test_exposed_transfers_of_unknown_size_are_neither_fine_nor_latency(messages):
    told = transfers(0, messages)
    assert [finding.kind for finding in told.findings] == ["bandwidth-bound"]
    assert told.verdict.recoverable_ms == pytest.approx(50)
    assert f"{messages} message" in told.verdict.sentence
    assert "without sizes, bytes and latency cannot be separated" in told.verdict.sentence
    assert transfers(0, messages, exposed=30).verdict.kind == "bandwidth-bound", "and no compute-bound step"


def test_a_few_small_messages_are_bandwidth_bound():
    told = transfers(20_000, 2)
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(50)
    assert "cannot be separated" in told.verdict.sentence
    linked = transfers(20_000, 3, bandwidth=1e9)
    assert linked.verdict.recoverable_ms == pytest.approx(50)
    assert linked.verdict.sentence.endswith("49.5 ms of it are latency.")


@pytest.mark.parametrize("compute", [50, 70])
def test_a_blocked_thread_is_not_fine(compute):
    spans = []
    for n in range(COUNT):
        for rank in (0, 1):
            at, mine = 100 * n, {"rank": rank, "step": n}
            spans += [span("step", at, at + 100, **mine), span("forward", at, at + compute, **mine)]
            spans += [span("wait", at + compute, at + 100, name="blocked", **mine)]
    told = analyze(Trace.of(spans))
    assert told.verdict.kind == "unclear"
    assert f"most of it is waits, {100 - compute}.0 ms ({100 - compute}%)" in told.verdict.sentence


def engine(recorded, *, count=60, every=5, skew=15.0, long=8.0):
    """Two ranks of an engine, one `skew` ms behind: an exchange ends behind the next step's forward pass.

    Of the steps `recorded` names, by their number modulo `every`, there are spans; of every n-th the step.
    """
    spans = []
    for n in range(count):
        for rank in (0, 1):
            at, mine = 100 * n + skew * rank, {"rank": rank, "step": n}
            if n % every == 0:
                spans.append(span("step", at, at + 100, **mine))
            if n % every in recorded:
                spans += [span("forward", at, at + 40, **mine), span("backward", at + 40, at + 95, **mine)]
                spans += [span("update", at + 95, at + 100, **mine)]
                end = 100 * n + 96 + skew + long
                spans.append(span("exchange", at + 96, end, name="allreduce", unit="w", size=5_000_000, **mine))
    return spans


@pytest.mark.parametrize("recorded", [(0,), (0, 1, 4)], ids=["step alone", "with its neighbours"])
def test_time_between_sampled_steps_does_not_count_as_idle(recorded):
    told = analyze(Trace.of(engine(recorded)))
    assert told.verdict.kind == "fine"
    assert told.late == ()
    assert told.communication == pytest.approx(1)
    assert [unit.exposed_ms for unit in told.units] == [0]


def test_the_recorder_keeps_what_hides_an_exchange_of_a_sampled_step():
    made = engine((0, 1, 4))
    kept = [s for rank in (0, 1) for s in finish_spans([s for s in made if s.rank == rank], sampled=True)]
    behind = [s for s in kept if s.lane == "forward" and s.step % 5 == 1]
    assert behind, "the forward pass of the step behind"
    assert analyze(Trace.of(kept)).verdict.kind == "fine"


def test_compute_of_the_next_step_hides_an_exchange():
    spans = []
    for n in range(COUNT):
        at = 100 * n
        spans += [span("step", at, at + 100, step=n), span("forward", at, at + 60, step=n)]
        spans += [span("exchange", at + 90, at + 120, unit="w", size=1000, step=n)]
    # The last step is chosen with what lies behind it left out.
    assert analyze(Trace.of(spans), steps=(2, 8)).communication == pytest.approx((5 * 20 / 30) / (5 + 10 / 30))


def test_unknown_time_counts_for_overlap_only_where_it_is_hidden():
    made = [span("exchange", 0, 30, unit="w"), span("backward", 0, 10), span("forward", 20, 25)]
    assert overlap(made) == pytest.approx(15 / 30)
    assert overlap(made, within=[(0, 15 * MS)]) == pytest.approx(15 / 20)


def test_a_few_packets_do_not_show_a_bandwidth():
    # By chance the longer messages took longer: as bytes, that would be 3 Mbit/s.
    sizes = {8: 1.0, 24: 1.4, 400: 2.0, 900: 3.1, 1700: 5.5}
    exchange = [("exchange", ms, f"w{size}", size) for size, ms in sizes.items()]
    told = analyze(Trace.of(steps(COUNT, *[[("forward", 20), ("backward", 20), *exchange, ("update", 2)]] * 2)))
    assert (told.verdict.kind, told.network.known) == ("latency-bound", "assumed")


def test_times_that_do_not_grow_with_sizes_are_latency():
    assert fit([(1000.0, 5.0), (2000.0, 5.0), (64_000.0, 5.0)]) == (5.0, 0.0)
    assert fit([(1000.0, 9.0), (2000.0, 5.0), (64_000.0, 5.0)]) == (5.0, 0.0), "nor do they fall"
    assert fit([(1000.0, 5.0), (2000.0, 5.0)]) is None, "too alike to tell"
    # 10 ms each, and 10 Gbit/s.
    sizes = [10_000] * 4 + [500_000] * 6
    exchange = [("exchange", 10 + size * 8e-7, f"w{i}", size) for i, size in enumerate(sizes)]
    told = analyze(Trace.of(steps(COUNT, *[[("forward", 20), ("backward", 20), *exchange, ("update", 2)]] * 2)))
    assert (told.verdict.kind, told.network.known) == ("latency-bound", "fitted")
    assert told.network.latency_ms == pytest.approx(10)
    assert told.verdict.recoverable_ms == pytest.approx(90, rel=0.05), "one of ten messages is left"
    level = [("exchange", 10, f"w{i}", size) for i, size in enumerate(sizes)]
    told = analyze(Trace.of(steps(COUNT, *[[("forward", 20), ("backward", 20), *level, ("update", 2)]] * 2)))
    assert told.verdict.kind == "latency-bound"
    assert told.verdict.recoverable_ms == pytest.approx(90, rel=0.06)


@pytest.mark.parametrize("world", [1, 2, 16])
def test_ranks_without_transfers_do_not_lower_the_mean_of_transfers(world):
    spans = []
    for n in range(COUNT):
        at = 50 * n
        spans += [span("step", at, at + 50, rank=rank, step=n) for rank in range(world)]
        spans += [span("wait", at, at + 1, rank=r, name="all-reduce", unit="w", step=n) for r in range(1, world)]
        spans += [span("exchange", at + 2, at + 42, name="all-reduce", unit="w", step=n, size=10_000_000)]
    told = analyze(Trace.of(spans))
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(40)


def turns(world, *, late, count=24, by=40):
    """Ranks of which, in each step, `late(step)` takes longer in its forward pass."""
    spans: list[Span] = []
    at = 0.0
    for n in range(count):
        end = at + 50 + (by if late(n) is not None else 0) + 5
        for rank in range(world):
            mine, begin = {"rank": rank, "step": n}, at + 20 + (by if late(n) == rank else 0)
            spans += [span("forward", at, begin, **mine), span("backward", begin, begin + 30, **mine)]
            spans += [span("exchange", begin + 30, end, name="all-reduce", unit="w", size=1_000_000, **mine)]
            spans += [span("update", end, end + 2, **mine), span("step", at, end + 2, **mine)]
        at = end + 2
    return spans


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_late_in_turn_cost_each_step_all_of_it(world):
    told = analyze(Trace.of(turns(world, late=lambda step: step % world)))
    assert told.verdict.kind == "unclear"
    assert told.verdict.recoverable_ms == pytest.approx(40, rel=0.05)
    assert "Without these waits a step is 40.0 ms shorter" in told.verdict.sentence


def test_with_missing_ranks_waits_do_not_count_as_bytes():
    alone = [s for s in turns(2, late=lambda _: 1) if s.rank == 0]
    told = analyze(Trace.of(alone, metadata={"world_size": 2}, split=False))
    assert "are bytes on the network, or waits for another rank, that no compute hides" in told.verdict.sentence
    assert "or waits" not in analyze(Trace.of(alone, metadata={"world_size": 1}, split=False)).verdict.sentence
    apart = analyze(Trace.of(alone, metadata={"world_size": 1, "aligned": False}, split=False))
    assert "or waits for another rank" in apart.verdict.sentence
    assert (
        "or waits for another rank"
        in analyze(Trace.of(alone, metadata={"clock_error_ns": None}, split=False)).verdict.sentence
    )


def test_a_single_file_of_a_job_notes_unknown_waits(tmp_path):
    shutil.copy(GLOO[1], tmp_path)
    source = load(tmp_path / GLOO[1].name)
    assert source.metadata["world_size"] == 2
    assert source.notes[-1] == "the trace has 1 of 2 ranks: waits for a late rank cannot be separated from transfers"
    for path in GLOO:
        shutil.copy(path, tmp_path)
    assert not any("not told" in note for note in load(tmp_path).notes)


def test_a_trace_file_keeps_its_note_about_unknown_waits(tmp_path):
    made, path = turns(2, late=lambda _: 1), tmp_path / "trace.json.gz"
    note = "rank 1 ran on another host: waits for a late rank are not told from transfers"
    write_chrome_trace(Trace.of(made, metadata={"world_size": 2, "notes": [note]}, split=False), path)
    source = load(path)
    assert source.notes == (note,)
    assert any(
        "or waits for another rank" in one.sentence
        for one in analyze(Trace.of(made, metadata=source.metadata, split=False)).findings
    )
    write_chrome_trace(Trace.of([s for s in made if s.rank == 0], metadata={"world_size": 2}, split=False), path)
    assert load(path).notes == ("the trace has 1 of 2 ranks: waits for a late rank cannot be separated from transfers",)


def loading(exchange_ms, *, data=(55, 55)):
    """An engine whose exchanges run behind the next step's loading."""
    spans = []
    for n in range(COUNT):
        for rank, ms in enumerate(data):
            at, mine = 80 * n, {"rank": rank, "step": n}
            spans += [span("step", at, at + 80, **mine), span("data", at, at + ms, **mine)]
            spans += [span("forward", at + ms, at + 65, **mine), span("backward", at + 65, at + 78, **mine)]
            spans += [span("update", at + 78, at + 80, **mine)]
            end = at + 76 + exchange_ms
            spans += [span("exchange", at + 76, end, name="allreduce", unit="w", size=10_000_000, **mine)]
    return spans


def test_loading_that_hides_an_exchange_saves_only_the_rest():
    told = analyze(Trace.of(loading(58)))
    assert told.verdict.kind == "unclear"
    assert "an exchange runs at the same time: without one of them the other shows" in told.verdict.sentence
    told = analyze(Trace.of(loading(24)))
    assert told.verdict.kind == "input-bound"
    assert told.verdict.recoverable_ms == pytest.approx(35, rel=0.02)
    assert "20.0 ms of that hide an exchange, which would show instead" in told.verdict.sentence
    assert analyze(Trace.of(loading(3))).verdict.recoverable_ms == pytest.approx(55)


def test_not_every_rank_waits_for_its_input():
    told = analyze(Trace.of(loading(3, data=(55, 55, 0))))
    assert told.verdict.kind == "input-bound"
    assert told.verdict.sentence.startswith("2 of 3 ranks wait 55.0 ms per step")
    assert analyze(Trace.of(loading(3))).verdict.sentence.startswith("Every rank waits 55.0 ms")


def test_a_path_starts_with_its_step():
    spans = []
    for n in range(5):
        for rank in (0, 1):
            at, mine = 100 * n, {"rank": rank, "step": n + 5}
            spans += [span("step", at, at + 100, **mine), span("forward", at + 40, at + 100, **mine)]
    path = [(piece.lane, piece.ms) for piece in analyze(Trace.of(spans)).critical_path]
    assert path == [("other", 40), ("forward", 60)]


def test_a_path_ends_where_two_ranks_wait_for_each_other():
    # Sends and receives: each is said to have waited for the other, in two exchanges at the same time.
    spans = []
    for rank, (first, second) in enumerate((("a", "b"), ("b", "a"))):
        spans += [span("step", 0, 100, rank=rank), span("forward", 0, 30, rank=rank)]
        spans += [span("wait", 30, 80, rank=rank, name="send", unit=first)]
        spans += [span("exchange", 80, 100, rank=rank, name="send", unit=first, size=9)]
        spans += [span("exchange", 75, 79, rank=rank, name="send", unit=second, size=9)]
    told = analyze(Trace.of(spans))
    assert sum(piece.ms for piece in told.critical_path) == pytest.approx(100)
    assert len(told.critical_path) < 10


PIECES = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(LANES), st.sampled_from("ab"), st.integers(-9, 90), st.integers(0, 40)
    ),
    max_size=25,
)


@given(PIECES, st.booleans())
def test_a_path_is_as_long_as_its_step_where_ranks_start_together(pieces, split):
    made = [span(lane, at, at + long, rank=rank, unit=unit) for rank, lane, unit, at, long in pieces]
    made = Trace.of(made).spans if split else made
    told = analyze(Trace.of([*made, *(span("step", 0, 80, rank=rank) for rank in range(3))], split=False))
    assert sum(piece.ms for piece in told.critical_path) == pytest.approx(80)


def test_probing_and_planning_in_one_step_share_its_update():
    spans = []
    for n in range(20):
        at, long = 200 * n, 160 if n == 3 else 50
        spans += [span("step", at, at + long, step=n), span("forward", at, at + 50, step=n)]
        if n == 3:
            spans += [span("update", at + 50, at + 70, name="probe", step=n)]
            spans += [span("update", at + 70, at + 160, name="replan", step=n)]
    found = analyze(Trace.of(spans)).startup
    assert found.extra_ms == pytest.approx(110)
    assert dict(found.causes) == pytest.approx({"replan": 90, "probe": 20})


@pytest.mark.parametrize(("planned", "steady"), [(3, 6), (6, 3), (7, 10), (9, 10)])
def test_a_tuned_job_that_plans_again_near_the_end_keeps_its_steps_for_the_verdict(planned, steady):
    # 10 slow steps are recorded of a job that has trained before; the tuner plans again because of them.
    spans = []
    for n in range(10):
        at = 200 * n
        spans += [span("step", at, at + 100, step=n + 50), span("data", at, at + 70, step=n + 50)]
        spans += [span("forward", at + 70, at + 100 if n != planned else at + 90, step=n + 50)]
        if n == planned:
            spans += [span("update", at + 90, at + 100, name="replan", step=n + 50)]
    told = analyze(Trace.of(spans))
    assert (told.verdict.kind, told.usual_steps) == ("input-bound", steady)


def test_steps_before_time_zero_end_with_their_last_span():
    told = analyze(Trace.of([span("forward", 10 * n - 1000, 10 * n - 992, step=n) for n in range(20)], split=False))
    assert told.per_step[-1]["ms"] == pytest.approx(8)


def test_steps_of_no_length_have_shares_that_sum_to_one():
    told = analyze(Trace.of([span("step", n, n, step=n) for n in range(COUNT)], split=False))
    assert told.ranks[0].breakdown["other"] == 1
    assert sum(told.breakdown.values()) == 1
    assert told.verdict.kind == "unclear"
