"""`SYNCLINE_WATCH=1` names the rank that is late, in the log of rank 0, while the job runs."""

import json
import zlib

import pytest
import torch.distributed as dist
import watch_ranks

from ranks import run_ranks
from syncline.trace import Recorder, Span
from syncline.trace.analysis.straggler_window import RankSteps, find_straggler
from syncline.trace.record import straggler_watch
from syncline.trace.record.straggler_watch import StragglerWatch

MS = 1_000_000
STEP_MS, WORLD = 100, 4


def steps(late=(), *, delay_ms=20.0, count=8, ahead=None, lane="data"):
    """Ranks whose steps have two exchanges; late ranks join them later, since a lane takes longer on them."""
    found = []
    for rank in range(WORLD):
        spans, delay = [], delay_ms if rank in late else 0.0
        other_clock = (ahead or {}).get(rank, 0)
        for step in range(count):
            begin = step * STEP_MS + other_clock

            def add(kind, name, start, end, unit="", step=step, begin=begin, rank=rank, spans=spans):
                spans.append(Span(rank, kind, name, unit, step, round((begin + start) * MS), round((begin + end) * MS)))

            add("step", "step", 0, STEP_MS)
            add(lane, lane, 0, 10 + delay)
            for number in range(2):
                add("exchange", "all-reduce", 30 + delay + 10 * number + 0.1 * rank, 90, f"bucket {number}")
        host = "b" if other_clock else "a"
        found.append(RankSteps.of(spans, rank=rank, host=host, node=f"node {host}"))
    return found


@pytest.mark.parametrize("late", [(0,), (2,), (3,), (1, 3)])
def test_late_ranks_are_found(late):
    found = find_straggler(steps(late))
    assert found.ranks == late
    assert found.delay_ms == pytest.approx(20, abs=0.5)
    assert (found.lane, found.lane_ms) == ("data", pytest.approx(20))
    assert "20% of a step (median of 8 steps up to step 7): 20 ms more in data loading" in found.sentence


@pytest.mark.parametrize("late", [(), (0, 1, 2)])
def test_nobody_is_named_without_a_straggler(late):
    assert find_straggler(steps(late)) is None


def test_a_delay_that_is_small_for_the_step_is_not_named():
    assert find_straggler(steps((1,), delay_ms=2.0)) is None


def test_a_rank_that_is_late_once_is_not_named():
    usual, once = steps(), steps((1,))
    usual[1].joins = [s for s in usual[1].joins if s.step] + [s for s in once[1].joins if not s.step]
    assert find_straggler(usual) is None


def test_the_clock_of_another_host_is_not_a_delay():
    assert find_straggler(steps(ahead={2: 5000, 3: 5000})) is None
    found = find_straggler(steps((3,), ahead={2: 5000, 3: 5000}))
    assert found.ranks == (3,)
    assert "(node b)" in found.sentence


def test_ranks_that_are_late_in_turn_are_not_named():
    ranks = [steps((number,)) for number in range(2)]
    mixed = [RankSteps(rank, "a", "", [], ranks[0][rank].lanes) for rank in range(WORLD)]
    for one in mixed:
        one.joins = [s for turn in (0, 1) for s in ranks[turn][one.rank].joins if s.step % 2 == turn]
    assert find_straggler(mixed) is None


def test_only_steps_that_all_ranks_recorded_count():
    ranks = steps((2,))
    ranks[1] = RankSteps.of([], rank=1, host="a", node="")
    assert find_straggler(ranks) is None


def test_the_message_holds_everything():
    (one, *_) = steps((0,))
    assert RankSteps.from_json(one.as_json()) == one


def test_a_message_is_small_however_many_exchanges_a_step_has(monkeypatch):
    monkeypatch.setattr(straggler_watch, "PERIOD_S", 1e6)
    recorder, store = Recorder(rank=1), dist.HashStore()
    for step in range(100):
        recorder.step = step
        for number in range(50):
            recorder.add("exchange", "allreduce", step * MS, step * MS + 1, unit=f"layer{number}", step=step)
        recorder.add("step", "step", step * MS, step * MS + 2, step=step)
    watch = StragglerWatch(store, recorder, rank=1, world=2)
    watch.compare_now()
    watch.close()
    sent = RankSteps.from_json(json.loads(zlib.decompress(store.get("watch/1"))))
    assert sorted(sent.lanes) == list(range(82, 98)), "the current step and the one before may be incomplete"
    assert {span.unit for span in sent.joins} == {"layer0", "layer1", "layer8", "layer9"}, "first and last by name"
    assert len(sent.joins) == 16 * 4


@pytest.mark.parametrize("kind", ["ddp", "attach"])
def test_a_running_job_names_its_straggler(tmp_path, kind):
    (said, first), (other, second) = run_ranks(watch_ranks.watched, 2, kind, 1, str(tmp_path))
    assert said[0].startswith("syncline: watch: rank 1 ")
    assert "ms after the others" in said[0]
    assert other == []
    assert first == second
    assert (tmp_path / "trace.json.gz").exists() is (kind == "ddp")
