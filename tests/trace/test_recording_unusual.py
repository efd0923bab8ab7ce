"""Recordings under unusual conditions: gradients off, other systems, forks, copies, recursive models."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncline.trace import Recorder, recording, start, stop
from syncline.trace.formats.load import load
from syncline.trace.record.collectives import _around_wait, _record_completion
from syncline.trace.record.cpu_time import StepCpuTimes
from syncline.trace.record.loop_hooks import LoopHooks, TimedLoader

FORKED = """
import multiprocessing
import syncline, torch

def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit(3)

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
assert child.exitcode == 3, child.exitcode
"""


def make():
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_may_be_off_at_stop(tmp_path):
    from syncline.trace.record.overhead import _call_cost

    for number, off in enumerate((torch.no_grad, torch.inference_mode)):
        _call_cost.cache_clear()
        model, optimizer = make()
        start(tmp_path / f"{number}.json", model=model, optimizer=optimizer)
        train(model, optimizer)
        with off():
            assert stop() == tmp_path / f"{number}.json"
        source = load(tmp_path / f"{number}.json")
        assert source.notes == ()
        assert source.metadata["recorder"]["overhead_ns_per_step"] > 0


def test_the_trace_is_written_if_the_cost_is_unknown(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no idea\nat all")

    monkeypatch.setattr("syncline.trace.record.overhead._call_cost", broken)
    model, optimizer = make()
    with recording(model, optimizer, path=tmp_path / "t.json"):
        train(model, optimizer)
    source = load(tmp_path / "t.json")
    assert source.notes == ("rank 0: the cost of recording is not known: RuntimeError: no idea",)
    assert "overhead_ns_per_step" not in source.metadata["recorder"]
    assert source.metadata["recorder"]["every"] == 1


def test_other_systems_report_no_cpu_times(monkeypatch):
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "O_CLOEXEC")
    counted = StepCpuTimes()
    for _ in range(2):
        counted.sample()
    counted.add(0)
    assert counted.rows == []


def test_a_forked_rank_writes_its_trace(tmp_path):
    variables = {**os.environ, "SYNCLINE_TRACE": str(tmp_path / "here")}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {s.step for s in load(tmp_path / "here").spans} == {0, 1, 2}


def test_a_loader_can_be_copied():
    loader = TimedLoader(len, [1, 2])
    for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(copied) == 2
        assert copied.index(2) == 1


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, depth=2):
        x = self.inner(x)
        return self(x, depth - 1) if depth else x


def forwards(source, step):
    return [s for s in source.spans if (s.lane, s.name, s.step) == ("forward", "forward", step)]


def test_a_model_that_calls_itself_is_one_forward(tmp_path):
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, path=tmp_path / "t.json") as running:
        train(model, optimizer, 1)
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 9))
        running.add([model], [optimizer])  # attached again
        train(model, optimizer, 2)
    source = load(tmp_path / "t.json")
    assert [len(forwards(source, step)) for step in range(3)] == [1, 1, 1]
    assert not model._forward_hooks


def test_threads_have_their_own_forward_spans(tmp_path):
    both = threading.Barrier(2)

    class Met(nn.Linear):
        def forward(self, x):
            both.wait(10)
            made = super().forward(x)
            both.wait(10)
            return made

    model = Met(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, path=tmp_path / "t.json"):
        other = threading.Thread(target=lambda: model(torch.ones(4, 8)))
        other.start()
        loss = model(torch.ones(4, 8)).sum()
        other.join()  # its forward pass belongs to the step in which it ends
        loss.backward()
        optimizer.step()
    assert len(forwards(load(tmp_path / "t.json"), 0)) == 2


def test_a_work_without_a_future_ends_when_the_loop_waits_for_it_and_is_noted_once_if_nobody_does():
    class Work:
        def get_future(self):
            raise NotImplementedError

    hooks = LoopHooks(Recorder())
    optimizer = torch.optim.SGD([torch.ones(1)])
    for _ in range(2):
        _record_completion(hooks, Work(), 0, "all-reduce", "collective 0", 4, torch.device("cpu"), "")
        hooks.after_step(optimizer)
    (note,) = hooks.notes
    assert note.startswith("a collective has no span, because its end cannot be observed")
    waited = Work()
    _record_completion(hooks, waited, 5, "all-reduce", "collective 0", 4, torch.device("cpu"), "")
    _around_wait(hooks)(lambda work: None, waited)
    assert [span.start for span in hooks.recorder.spans() if span.lane == "exchange"] == [5]
    assert hooks.exchanges_started == 0


def test_collectives_are_numbered_per_group(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, x = dist.new_group([0]), torch.ones(1)
        model, optimizer = make()
        with recording(model, optimizer, path=tmp_path / "t.json"):
            dist.all_reduce(x)
            dist.all_reduce(x, dist.ReduceOp.SUM, group)
            dist.broadcast(x, 0, group=group, async_op=True).wait()
            dist.all_reduce(x, group=dist.group.WORLD)
            train(model, optimizer, 1)
        units = [s.unit for s in load(tmp_path / "t.json").spans if s.lane == "exchange"]
        name = group.group_name[:8]
        apart = [f"collective {number} of group {name} (ranks 0)" for number in (0, 1)]
        assert sorted(units) == ["collective 0", apart[0], "collective 1", apart[1]]
    finally:
        dist.destroy_process_group()


def test_a_rank_whose_group_is_gone_writes_its_own_file(tmp_path):
    model, optimizer = make()
    running = start(tmp_path, model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    running._rank, running._world = 1, 2  # as before the group was destroyed
    assert stop() == tmp_path / "rank1.spans.jsonl.gz"
    assert not (tmp_path / "trace.json.gz").exists()
    source = load(tmp_path)
    assert {s.rank for s in source.spans} == {1}
    assert running.written.notes[0].startswith("the process group was destroyed before the recording stopped")
