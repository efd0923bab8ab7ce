"""Recordings on several ranks: the content of the trace, identical results, and no hooks left behind."""

import logging
from itertools import pairwise

import pytest
from recording_ranks import (
    LAYER_BYTES,
    LAYERS,
    WIDTH,
    alone,
    by_environment,
    by_hand,
    crashing,
    crashing_alone,
    sampled,
    several_passes,
    with_and_without,
)

from ranks import run_ranks
from syncline.trace import partition
from syncline.trace.formats.load import load
from syncline.trace.span import ISSUING


def spans_of(source, rank, lane, step=None):
    return [s for s in source.spans if s.rank == rank and s.lane == lane and step in (None, s.step)]


@pytest.mark.parametrize(
    ("kind", "world", "view"), [("ddp", 2, False), ("ddp", 3, True), ("bf16", 2, False), ("attach", 2, False)]
)
def test_results_are_bit_identical_and_no_hook_is_left(tmp_path, kind, world, view):
    assert run_ranks(with_and_without, world, kind, str(tmp_path), view) == [(True, True)] * world
    for number in (0, 1):
        source = load(tmp_path / str(number))
        assert source.notes == ()
        told = source.metadata
        assert told["strategy"] == {"attach": "syncline"}.get(kind, "ddp")
        assert (told["world_size"], told["backend"], told["clock_error_ns"]) == (world, "gloo", 0)
        assert sorted(told["hosts"]) == [str(rank) for rank in range(world)]
        assert len(told["cores"]) == 1
        assert 0 < told["recorder"]["overhead_ns_per_step"] < 5e6
        for rank in range(world):
            assert [row[0] for row in told["usage"][str(rank)]] == [0, 1, 2]
            assert all(cpu > 0 and delay >= 0 for _, cpu, delay in told["usage"][str(rank)])
            mine = [s for s in source.spans if s.rank == rank]
            steps = partition(mine)
            assert list(steps) == [0, 1, 2]
            for lane in ("between", "forward", "backward", "exchange", "update"):
                assert spans_of(source, rank, lane, 1), (rank, lane)
            moved = {s.unit: s.bytes for s in spans_of(source, rank, "exchange", 1)}
            sizes = {"bf16": LAYER_BYTES // 2}
            assert sum(moved.values()) == LAYERS * sizes.get(kind, LAYER_BYTES)
            if kind == "ddp":
                assert set(moved) == {f"bucket {i}" for i in range(len(moved))}


def test_steps_cover_all_time_and_a_late_rank_is_a_wait(tmp_path):
    walls = run_ranks(by_hand, 2, str(tmp_path))
    source = load(tmp_path)
    for rank in (0, 1):
        mine = [s for s in source.spans if s.rank == rank]
        brackets = sorted((s for s in mine if s.lane == "step"), key=lambda s: s.start)
        assert all(a.end == b.start for a, b in pairwise(brackets))
        phases = partition(mine)
        whole = sum(sum(step.values()) for step in phases.values())
        assert whole == pytest.approx(walls[rank], rel=0.15)  # other programs may run here
        exchanges = spans_of(source, rank, "exchange", 2)
        assert len({s.unit for s in exchanges}) == 2 * LAYERS
        assert sum(s.bytes for s in exchanges) == LAYERS * LAYER_BYTES
    waited = sum(step["wait"] for step in partition([s for s in source.spans if s.rank == 0]).values())
    assert waited > 4 * 15_000_000
    assert sum(s.bytes for s in spans_of(source, 0, "exchange", 0)) == 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("kind", ["ddp", "attach"])
def test_only_every_nth_step_is_recorded(tmp_path, kind):
    run_ranks(sampled, 2, kind, str(tmp_path))
    source = load(tmp_path)
    assert source.metadata["recorder"]["every"] == 3
    for rank in (0, 1):
        assert [s.step for s in sorted(spans_of(source, rank, "step"), key=lambda s: s.start)] == [0, 3, 6]
        if kind == "ddp":  # with an engine the steps before and after are recorded as well
            assert {s.step for s in spans_of(source, rank, "forward")} <= {0, 3, 6}
        assert [row[0] for row in source.metadata["usage"][str(rank)]] == [0, 3, 6]
        assert sum(s.bytes for s in spans_of(source, rank, "exchange", 3)) == LAYERS * LAYER_BYTES


@pytest.mark.parametrize(("kind", "steps"), [("attach", [0, 2, 4]), ("wrapper", [0, 2, 4]), ("ddp", [0, 2, 4])])
def test_the_environment_variable_is_enough(tmp_path, kind, steps):
    left = run_ranks(by_environment, 2, kind, str(tmp_path / "t.json.gz"))
    assert left == [0, 0]
    source = load(tmp_path / "t.json.gz")
    assert source.notes == ()
    for rank in (0, 1):
        assert [s.step for s in sorted(spans_of(source, rank, "step"), key=lambda s: s.start)] == steps
        assert spans_of(source, rank, "forward", 2)
        assert spans_of(source, rank, "exchange", 2)


def test_after_a_crash_the_trace_is_still_written(tmp_path):
    assert run_ranks(crashing, 2, str(tmp_path), (0, 1)) == [("the batch is broken", True)] * 2
    source = load(tmp_path)
    assert source.notes == ("ranks 0-1 ended with an error: ValueError: the batch is broken",)
    for rank in (0, 1):
        assert [s.step for s in sorted(spans_of(source, rank, "step"), key=lambda s: s.start)] == [0, 1, 2]


@pytest.mark.parametrize("who", [0, 1])
def test_the_spans_of_a_rank_that_crashes_are_merged_with_those_of_a_blocked_one(tmp_path, who):
    caught = run_ranks(crashing_alone, 2, str(tmp_path), who)
    assert (caught[who], caught[1 - who]) == ("ValueError", "RuntimeError")
    source = load(tmp_path)
    assert source.notes == (f"rank {who} ended with an error: ValueError: the batch is broken",)
    for rank in (0, 1):
        assert [s.step for s in spans_of(source, rank, "step")] == [0, 1, 2]
    assert not list(tmp_path.glob("*.spans.*"))


def test_a_rank_that_does_not_arrive_is_left_out(tmp_path):
    zero, one = run_ranks(alone, 2, str(tmp_path / "zero"), 0)
    assert (zero, one) == (str(tmp_path / "zero" / "trace.json.gz"), None)
    source = load(tmp_path / "zero")
    assert "rank 1 did not arrive in time: not in this trace" in source.notes
    assert {s.rank for s in source.spans} == {0}


def test_without_rank_0_a_rank_writes_its_own_file_which_can_be_merged(tmp_path):
    zero, one = run_ranks(alone, 2, str(tmp_path), 1)
    assert (zero, one) == (None, str(tmp_path / "rank1.spans.jsonl.gz"))
    source = load(tmp_path)
    assert source.notes == ("rank0.spans.jsonl.gz is missing: rank 0 is left out",)
    assert [s.step for s in spans_of(source, 1, "step")] == [0, 1, 2]


def test_accumulation_evaluation_and_several_calls_have_their_own_spans(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    run_ranks(several_passes, 2, str(tmp_path))
    source = load(tmp_path)
    for rank in (0, 1):
        forwards = [s.name for s in sorted(spans_of(source, rank, "forward", 1), key=lambda s: s.start)]
        # The loop also calls the inner model, twice, which the recording was not told about.
        assert forwards == ["evaluation", "forward", "loss", "forward", "loss", *["forward"] * 3, "loss"]
        # A pass continues where the thread has issued a message.
        continued = {s.end for s in spans_of(source, rank, "wait", 1) if s.name == ISSUING}
        backwards = [s for s in spans_of(source, rank, "backward", 1) if s.name == "backward"]
        assert len([s for s in backwards if s.start not in continued]) == 3
        assert len({s.unit for s in spans_of(source, rank, "exchange", 1)}) == len(
            spans_of(source, rank, "exchange", 1)
        )
        assert {s.name for s in spans_of(source, rank, "data")} == {"data"}
        other = partition([s for s in source.spans if s.rank == rank])[1]["other"]
        assert other > 8_000_000  # the sleep is in no lane
