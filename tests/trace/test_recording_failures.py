"""A recording never ends the script that it observes: bad paths, failures at stop and in hooks, wrong variables."""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from syncline.trace import __main__ as run_command
from syncline.trace import load, start, stop
from syncline.trace.record import at_startup, known_models, recording, session

SCRIPT = """
import sys
from torch import nn, ones, optim

model = nn.Linear(4, 4)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(sys.argv[1:], "syncline" in dir())
"""


def train(steps=3):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_of(path):
    return sorted(span.step for span in load(path).spans if span.lane == "step")


@pytest.mark.parametrize("kind", ["file in place of the folder", "folder in place of the file"])
def test_a_path_that_cannot_be_written_is_noticed_at_start_and_nothing_is_lost(tmp_path, monkeypatch, caplog, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "taken" / "trace.json"
    if kind.startswith("file"):
        (tmp_path / "taken").write_text("")
    else:
        path.mkdir(parents=True)
    start(path, every=1)
    assert "the trace cannot be written to" in caplog.text
    assert str(path) in caplog.text
    caplog.clear()
    train()
    written = stop()
    assert written is not None
    assert str(path) in caplog.text
    assert str(written) in caplog.text
    assert steps_of(written) == [0, 1]


def test_a_check_of_the_path_leaves_nothing_behind(tmp_path, caplog):
    start(tmp_path / "a" / "b.json")
    assert stop() is None
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""


def test_a_failure_at_stop_is_a_warning(tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise MemoryError("no room for spans")

    monkeypatch.setattr(recording, "finish_spans", broken)
    start(tmp_path / "t.json", every=1)
    train()
    assert stop() is None
    assert "the trace was not written: MemoryError: no room for spans" in caplog.text
    train()
    assert not (tmp_path / "t.json").exists()


def test_a_hook_that_cannot_be_installed_ends_the_recording_and_not_the_loop(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("this torch has no such hook")

    monkeypatch.setattr(known_models, "hook_module", broken)
    started = start(tmp_path / "t.json", every=1)
    train(5)
    assert started.stopped
    assert "ended early" in caplog.text
    assert any("this torch has no such hook" in note for note in load(tmp_path / "t.json").notes)


def test_a_wrong_interval_in_the_environment_is_ignored_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(session.PATH, str(tmp_path / "t.json"))
    monkeypatch.setenv(session.EVERY, "often")
    session.start_if_requested()
    assert "SYNCLINE_TRACE_EVERY=often is ignored" in caplog.text
    train()
    assert stop() == tmp_path / "t.json"


def test_a_recording_of_the_script_ends_that_of_the_environment(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(session.PATH, str(tmp_path / "variable.json"))
    session.start_if_requested()
    train(4)
    start(tmp_path / "own.json", every=1)
    train(4)
    assert stop() == tmp_path / "own.json"
    assert "because the script starts its own" in caplog.text
    assert steps_of(tmp_path / "variable.json") == steps_of(tmp_path / "own.json") == [0, 1, 2]


def test_a_script_that_does_not_import_syncline_is_recorded_by_the_hook(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "sitecustomize.py").write_text("print('their own')")
    path = [str(Path(at_startup.__file__).parent), str(tmp_path), *sys.path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), session.PATH: "here", session.EVERY: "2"}
    done = subprocess.run(
        [sys.executable, "train.py", "--lr", "1"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("their own\n['--lr', '1'] False\n", "")
    assert steps_of(tmp_path / "here") == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "command", "every"),
    [
        (["train.py", "--out", "mine", "-m"], ["train.py", "--out", "mine", "-m"], None),
        (["--every=3", "--out", "here", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
         ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"], "3"),
    ],
)  # fmt: skip
def test_the_run_command_sets_the_variables_and_becomes_the_script(monkeypatch, arguments, command, every):
    called = []
    monkeypatch.setattr(sys, "argv", ["syncline.trace", "run", *arguments])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "syncline.trace", "run", *arguments])
    monkeypatch.setattr(os, "execv", lambda *given: called.append(given))
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "theirs"})
    run_command.main()
    assert called == [(sys.executable, [sys.executable, "-u", *command])]
    hook = str(Path(at_startup.__file__).parent)
    expected = {"PYTHONPATH": f"{hook}:theirs", "SYNCLINE_TRACE": "here" if every else "syncline-trace"}
    assert os.environ == expected | ({"SYNCLINE_TRACE_EVERY": every} if every else {})


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "--every", "0", "a.py"], ["record", "a.py"]])
def test_a_wrong_run_command_exits_with_2(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["syncline.trace", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command.main()
    assert ended.value.code == 2
    assert "usage: python -m syncline.trace run" in capsys.readouterr().err


CRASHING = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(12):
    if number == 8 and dist.get_rank() == 1:
        raise ValueError("the batch is broken")
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.full
def test_under_torchrun_the_trace_has_the_rank_that_crashes_and_the_one_that_is_ended(tmp_path):
    (tmp_path / "train.py").write_text(CRASHING)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "syncline.trace", "run"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, "--every", "1", "--out", "here", "train.py"],
        env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the batch is broken" in done.stderr
    source = load(tmp_path / "here")
    assert source.notes == ("rank 1 ended with an error: ValueError: the batch is broken",)
    for rank in (0, 1):
        assert [s.step for s in source.spans if s.rank == rank and s.lane == "step"] == list(range(7))


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING)
    yield
    stop()
