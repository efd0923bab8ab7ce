"""Recordings in one process: start and stop, compiled models, several optimizers, scripts, and small parts."""

import copy
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from syncline.errors import UsageError
from syncline.trace import PHASES, Recorder, Span, partition, recording, start, stop
from syncline.trace.formats.load import load
from syncline.trace.merge.merge_ranks import Part, merge
from syncline.trace.record.collectives import RecordingGroup
from syncline.trace.record.cpu_time import StepCpuTimes
from syncline.trace.record.loop_hooks import LoopHooks
from syncline.trace.record.postprocess import DDP_TAIL, finish_spans
from syncline.trace.span import BLOCKED, ISSUING

SCRIPT = """
import syncline, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit(3)
"""


def make():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def lanes(source, step):
    return [(s.lane, s.name) for s in sorted(source.spans, key=lambda s: (s.start, s.end)) if s.step == step]


def test_a_recording_that_waits_for_its_first_step_is_not_replaced(tmp_path):
    begun = start(tmp_path / "first.json")
    with pytest.raises(UsageError, match="a recording is running"):
        start(tmp_path / "second.json")
    assert repr(begun).endswith("waiting for the first optimizer step>")
    assert stop() is None


def test_a_plain_loop_is_recorded_between_start_and_stop(tmp_path):
    model, optimizer = make()
    for number in range(3):
        begun = start(tmp_path / f"{number}.json", model=model, optimizer=optimizer)
        with pytest.raises(UsageError, match="a recording is running"):
            start(tmp_path / "no.json")
        train(model, optimizer)
        assert repr(begun) == f"<Recording to {tmp_path / f'{number}.json'}: recording>"
        assert stop() == tmp_path / f"{number}.json"
        assert repr(begun).endswith("stopped>")
        assert stop() is None
        assert begun.stop() == tmp_path / f"{number}.json"
    source = load(tmp_path / "2.json")
    assert source.metadata["strategy"] == "loop"
    assert source.metadata["world_size"] == 1
    assert sorted(lanes(source, 1)) == sorted(
        [
            ("step", "step"),
            ("between", "between steps"),
            ("forward", "forward"),
            ("forward", "loss"),
            ("backward", "backward"),
            ("update", "before step"),
            ("update", "update"),
        ]
    )
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_models_are_found_if_none_is_named(tmp_path):
    model, optimizer = make()
    start(tmp_path / "a.json")
    train(model, optimizer, 4)
    stop()
    source = load(tmp_path / "a.json")
    # The first step shows that this process trains, and the recording starts at its end.
    assert sorted({s.step for s in source.spans}) == [0, 1, 2]
    assert all(("forward", "forward") in lanes(source, step) for step in range(3))
    with recording(optimizer=optimizer, path=tmp_path / "b.json"):
        train(model, optimizer, 2)
    source = load(tmp_path / "b.json")
    assert [lanes(source, step).count(("forward", "forward")) for step in (0, 1)] == [1, 1]
    assert not nn.modules.module._global_forward_hooks


def test_without_training_no_trace_is_written(tmp_path):
    start(tmp_path / "a.json")
    assert stop() is None
    assert not (tmp_path / "a.json").exists()


def test_the_last_optimizer_ends_a_step(tmp_path):
    (one, first), (two, second) = make(), make()
    with recording([one, two], [first, second], path=tmp_path / "t.json"):
        for _ in range(3):
            for _ in range(2):  # the critic twice
                train(one, first, 1)
            train(two, second, 1)
    source = load(tmp_path / "t.json")
    assert sorted({s.step for s in source.spans}) == [0, 1, 2]
    assert [name for lane, name in lanes(source, 1) if lane == "forward"] == ["forward", "loss"] * 3
    assert [lane for lane, name in lanes(source, 1) if name == "update"] == ["update"] * 3


def test_partition_of_a_loop_with_known_durations(tmp_path):
    model, optimizer = make()

    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.01)
            return model(x)

    slow = Slow()
    with recording(slow, optimizer, path=tmp_path / "t.json") as running:
        for _ in running.data(time.sleep(0.02) or i for i in range(4)):
            slow(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
        assert len(running.data([1, 2])) == 2
    source = load(tmp_path / "t.json")
    steps = partition(source.spans)
    for step in (1, 2, 3):
        assert steps[step]["data"] >= 20_000_000
        assert steps[step]["forward"] >= 10_000_000
        assert steps[step]["between"] >= 5_000_000
    assert set(steps[1]) == set(PHASES)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_models_are_recorded_and_restored(tmp_path, inside):
    model, optimizer = make()
    called = model
    if inside:
        model.compile(backend="eager")
        before = model._compiled_call_impl
    else:
        called = torch.compile(model, backend="eager")
    train(called, optimizer, 1)
    with recording(called, optimizer, path=tmp_path / "t.json"):
        train(called, optimizer)
    train(called, optimizer, 1)
    assert lanes(load(tmp_path / "t.json"), 1).count(("forward", "forward")) == 1
    if inside:
        assert model._compiled_call_impl is before
    torch.compiler.reset()


def test_the_loop_can_continue_after_an_error_in_forward(tmp_path):
    model, optimizer = make()
    with recording(model, optimizer, path=tmp_path / "t.json"):
        train(model, optimizer, 1)
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 9))
        with pytest.raises(RuntimeError):
            torch.ones(()).backward()
        train(model, optimizer, 2)
    assert lanes(load(tmp_path / "t.json"), 1).count(("forward", "forward")) == 1


def test_a_model_can_be_copied_and_saved_during_a_recording(tmp_path):
    model, optimizer = make()
    with recording(model, optimizer, path=tmp_path / "t.json"):
        train(model, optimizer, 1)
        average = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        average(torch.ones(4, 8))
        train(model, optimizer, 1)
    assert lanes(load(tmp_path / "t.json"), 1).count(("forward", "forward")) == 1
    torch.load(tmp_path / "model.pt", weights_only=False)(torch.ones(4, 8))


def test_a_script_needs_only_the_variable(tmp_path):
    variables = {**os.environ, "SYNCLINE_TRACE": str(tmp_path / "here"), "SYNCLINE_TRACE_EVERY": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    source = load(tmp_path / "here")
    assert sorted({s.step for s in source.spans}) == [0, 2]
    assert source.metadata["recorder"]["every"] == 2


def test_wrong_arguments_raise_at_once():
    with pytest.raises(UsageError, match="every is 0"):
        start(every=0)
    with pytest.raises(UsageError, match="model is a int"):
        start(model=[3])
    with pytest.raises(UsageError, match="optimizer is a Linear"):
        start(optimizer=[nn.Linear(1, 1)])


def test_cpu_times_of_a_step():
    times = StepCpuTimes()
    times.sample()
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    times.sample()
    times.add(7)
    ((step, cpu, delay),) = times.rows
    assert step == 7
    assert cpu >= 20_000_000
    assert delay >= 0
    times.close()


def test_cpu_times_are_missing_if_the_kernel_does_not_report_them(monkeypatch, tmp_path):
    monkeypatch.setattr("syncline.trace.record.cpu_time.SCHEDSTAT", tmp_path / "no")
    recorder = Recorder()
    begin = recorder.mark("step")
    recorder.add("step", "step", begin, recorder.mark("step"))
    assert recorder.cpu_times.rows == []
    assert "usage" not in merge([Part(0, [], "a", cores=2, cpu_times=recorder.cpu_times.rows)]).metadata


def test_marks_taken_while_switched_off_make_no_span():
    recorder = Recorder(enabled=False)
    early = recorder.mark("exchange")
    recorder.restart(rank=2)
    recorder.add("exchange", "x", early, recorder.mark("exchange"))
    begun = recorder.mark("exchange")
    recorder.enabled = False
    recorder.add("exchange", "x", begun, recorder.mark("exchange"))
    assert recorder.spans() == []
    # Another thread may add it later.
    recorder.add_ending_now("exchange", "x", begun, unit="u", bytes=3, step=0)
    assert [(s.rank, s.unit, s.bytes) for s in recorder.spans()] == [(2, "u", 3)]
    recorder.restart()
    recorder.add_ending_now("exchange", "x", begun, unit="u", bytes=3, step=0)
    assert recorder.spans() == []


def test_ddp_waits_for_its_buckets_and_then_copies_out_of_them():
    spans = [
        Span(0, "backward", "backward", "", 0, 0, 10),
        Span(0, "backward", DDP_TAIL, "", 0, 10, 30),
        Span(0, "exchange", "all-reduce", "bucket 0", 0, 5, 25),
        Span(0, "step", "step", "", 0, 0, 40),
        Span(0, "exchange", "all-reduce", "bucket 0", 2, 41, 45),
    ]
    made = finish_spans(spans, sampled=False)
    assert [(s.lane, s.start, s.end) for s in made if s.name == "unpack"] == [("backward", 25, 30)]
    assert [(s.lane, s.start, s.end) for s in made if s.name == BLOCKED] == [("wait", 10, 25)]
    assert len(made) == 6
    assert len(finish_spans(spans, sampled=True)) == 5


def test_starting_ddps_all_reduce_is_not_backward():
    done = torch.futures.Future()
    done.set_result(None)

    def slow_start(*_):
        time.sleep(0.005)
        return SimpleNamespace(get_future=lambda: done)

    hooks = LoopHooks(Recorder())
    group = RecordingGroup(hooks, SimpleNamespace(rank=lambda: 0, size=lambda: 1, allreduce=slow_start))
    hooks.around_backward(lambda _: group.allreduce([torch.ones(4)]), torch.ones((), requires_grad=True))
    spans = hooks.recorder.spans()
    (issuing,) = [s for s in spans if s.name == ISSUING]
    assert issuing.end - issuing.start >= 5_000_000
    (message,) = [s for s in spans if s.lane == "exchange"]
    assert issuing.start <= message.start
    assert all(s.end <= issuing.start or s.start >= issuing.end for s in spans if s.lane == "backward")
