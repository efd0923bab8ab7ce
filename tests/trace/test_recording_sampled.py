"""The default sampling interval, its agreement across ranks, and the analysis of sampled traces."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from sampling_ranks import by_default, straggling
from torch import nn
from torch.distributed import HashStore

from ranks import run_ranks
from syncline.sim.replay.what_if import Replay
from syncline.trace import Trace, partition, recording
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.diff import diff, side
from syncline.trace.formats.load import load
from syncline.trace.record import sampling
from syncline.trace.record.recorder import Recorder
from syncline.trace.record.sampling import BUDGET, FIRST, IntervalChooser, Sampling, SharedSampling


def steps_of(source, rank=0):
    return sorted(s.step for s in source.spans if s.rank == rank and s.lane == "step")


def train(steps):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(path, steps, **options):
    with recording(path=path / "t.json", **options):
        train(1)  # the recording starts at the end of the first step
        train(steps)
    return load(path / "t.json")


def test_recording_stays_within_the_budget():
    for spans in (0, 12, 186, 5000):
        for step_ns in (1e5, 3e7, 8.5e7, 1e9):
            for engine in (False, True):
                every = sampling.sampling_interval(spans=spans, step_ns=step_ns, engine=engine)
                cost = (spans * 20e3 + 0.85e6) * (3 if engine else 1)
                assert cost / every <= BUDGET * step_ns * 1.000001
                assert every == 1 or cost / (every - 1) > BUDGET * step_ns


def test_long_steps_are_all_recorded_and_short_ones_sampled():
    assert sampling.sampling_interval(spans=12, step_ns=400e6, engine=False) == 1
    assert sampling.sampling_interval(spans=12, step_ns=61e6, engine=False) == 6
    assert sampling.sampling_interval(spans=88, step_ns=64e6, engine=True) == 41
    assert sampling.sampling_interval(spans=12, step_ns=0, engine=False) == 1  # a clock that does not advance


def test_steps_are_kept_by_their_number_alone():
    every = Sampling(7, since=30)
    assert [step for step in range(50) if every.keeps(step)] == [*range(30), 35, 42, 49]
    assert (every.effective_interval(30), every.effective_interval(31)) == (1, 7)
    assert [step for step in range(7) if Sampling(3).keeps(step)] == [0, 3, 6]
    assert all(map(Sampling().keeps, range(5)))


def test_the_interval_is_decided_once_from_the_last_of_the_first_steps(monkeypatch):
    now, seen, chosen = 0, [], []
    monkeypatch.setattr(sampling.time, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(sampling, "sampling_interval", lambda **facts: seen.append(facts) or 4)
    recorder, chooser = Recorder(), IntervalChooser(chosen.append)
    recorder.engines = 1
    done = []
    for number in range(FIRST):
        now += 900_000_000 if number < 9 or number == 15 else 100_000_000  # slow ones, and one by chance
        for _ in range(3):
            recorder.add("forward", "forward", 1, 2)
        recorder.step += 1
        done.append(chooser.step_ended(recorder))
    assert done == [False] * (FIRST - 1) + [True]
    assert seen == [{"spans": 3.0, "step_ns": 100_000_000, "engine": True}]
    assert chosen == [Sampling(4, since=FIRST + 10)]


def test_by_default_the_first_steps_are_all_recorded_and_then_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "sampling_interval", lambda **_: 7)
    monkeypatch.setattr(sampling, "_AHEAD_NS", 0)
    source = recorded(tmp_path, 52)
    assert steps_of(source) == [*range(30), 35, 42, 49]
    assert {s.step for s in source.spans} == set(steps_of(source))
    assert source.metadata["recorder"]["every"] == 7
    assert len(analyze(source).steps) == 33


def test_a_short_recording_has_all_steps(tmp_path):
    source = recorded(tmp_path, 25)
    assert steps_of(source) == [*range(25)]
    assert source.metadata["recorder"]["every"] == 1


def test_every_1_records_all_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "sampling_interval", lambda **_: 7)
    monkeypatch.setattr(sampling, "_AHEAD_NS", 0)
    source = recorded(tmp_path, 45, every=1)
    assert steps_of(source) == [*range(45)]
    assert source.metadata["recorder"]["every"] == 1


@pytest.mark.parametrize("kind", ["ddp", "attach"])
def test_ranks_sample_the_same_steps(tmp_path, kind):
    run_ranks(by_default, 2, kind, str(tmp_path), 100)
    source = load(tmp_path)
    assert source.notes == ()
    assert source.metadata["recorder"]["every"] == 5  # rank 0's choice
    assert steps_of(source, 0) == steps_of(source, 1)
    kept = steps_of(source)
    assert set(range(30)) < set(kept)
    assert set(range(0, 100, 5)) < set(kept)
    assert len(kept) < 90
    assert kept[-2:] == [90, 95]
    late = [s for s in source.spans if s.step == 95 and s.lane == "exchange"]
    assert {s.rank for s in late} == {0, 1}


def test_a_rank_uses_the_interval_when_it_learns_it_and_stops_listening_at_close():
    told, store = [], HashStore()
    other = SharedSampling(store, None, told.append)
    time.sleep(0.05)
    assert told == []
    first = SharedSampling(store, Sampling(9, since=40), told.append)
    until = time.monotonic() + 10
    while not told and time.monotonic() < until:
        time.sleep(0.01)
    assert told == [Sampling(9, since=40)]
    for one in (first, other):
        one.close()
    SharedSampling(HashStore(), None, told.append).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "syncline-sampling"]


def test_a_lost_store_raises_nothing():
    class Gone:
        def check(self, keys):
            raise RuntimeError("connection reset")

    SharedSampling(Gone(), None, pytest.fail).close()


@pytest.mark.parametrize("kind", ["ddp", "attach"])
@pytest.mark.alone
def test_every_fifth_step_gives_the_same_verdict_as_all_steps(tmp_path, kind):
    for name, every, steps in (("all", 1, 30), ("some", 5, 125)):
        run_ranks(straggling, 2, kind, str(tmp_path / name), steps, every)
    every_step, sampled = load(tmp_path / "all"), load(tmp_path / "some")
    assert steps_of(sampled, 0) == steps_of(sampled, 1) == [*range(0, 125, 5)]
    for source in (every_step, sampled):
        # Other programs may use this machine during the test, so CPU load is left out.
        told = analyze(replace(source, metadata={**source.metadata, "usage": {}, "cores": {}}))
        assert told.verdict.kind == "straggler"
        assert told.late[0].rank == 1
        for rank in (0, 1):
            mine = [s for s in source.spans if s.rank == rank]
            brackets = {s.step: s.end - s.start for s in mine if s.lane == "step"}
            assert {step: sum(phases.values()) for step, phases in partition(mine).items()} == brackets
        # The wait is not counted as communication if the exchange began in a step that was not recorded.
        assert told.ranks[0].breakdown_ms["wait"] > 12
        # It sleeps 20 ms longer; other programs may use this machine during the test.
        assert 8 < told.verdict.recoverable_ms < 32
    compared = diff(
        side(Trace.of(every_step.spans, metadata=every_step.metadata, split=False)),
        side(Trace.of(sampled.spans, metadata=sampled.metadata, split=False)),
    )
    assert compared.enough
    assert compared.step.ratio == pytest.approx(1, abs=0.4)
    for source in (every_step, sampled):
        assert 8 < Replay(source, first=5).ask("no-straggler").gain_ms < 32
