"""Pipes, folders, devices, sockets and loops of links in the place of files: one line, no hang, nothing replaced."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from invoke import Invoke, time_limit

import report_samples
from special_files import put
from syncline.files import write_text
from syncline.train.config import Config

RECORDED = Path(__file__).parent / "fixtures" / "recorded"
# The place of a file, and the commands that read it.
CASES = {
    "run/config.json": [("train", "--resume", "run")],
    "recipe.toml": [(*verb, "--recipe", "recipe.toml") for verb in (("train",), ("compare",), ("plan",))],
    "plan.toml": [("train", "--strategy", 'syncline(file="plan.toml")', "--nproc", "2")],
    "run/results.json": [("report", "run")],
    "run/runs/auto/costs.json": [("plan", "run/runs/auto"), ("simulate", "run/runs/auto/costs.json")],
    "run/runs/auto/shapes.json": [("plan", "run/runs/auto"), ("simulate", "run/runs/auto")],
    "run/runs/auto/plan.toml": [("plan", "run/runs/auto"), ("simulate", "run/runs/auto")],
    "run/runs/ddp/trace.json.gz": [("trace", "analyze", "run"), ("simulate", "run/runs/ddp", "--what", "2x")],
    "spans/rank0.spans.jsonl.gz": [("trace", "analyze", "spans"), ("trace", "export", "spans")],
    "trace.json": [("trace", "analyze", "trace.json"), ("trace", "diff", "trace.json", "trace.json")],
}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "loop"])
def test_every_reader_refuses_what_is_not_a_file(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    invoke = Invoke(monkeypatch, capfd)
    shutil.copytree(RECORDED, "run/runs/auto")
    for folder in ("spans", "run/runs/ddp"):
        Path(folder).mkdir()
    Path("run/config.json").write_text(json.dumps(Config().as_dict()))
    Path("run/results.json").write_text(json.dumps(report_samples.results(report_samples.run())))
    for name, commands in CASES.items():
        path, before = tmp_path / name, None
        if path.exists():
            before = path.read_bytes()
            path.unlink()
        put(kind, path)
        for args in commands:
            with time_limit(60):
                done = invoke(*args)
            assert done.code == 2, (kind, args, done)
            assert len(done.err.strip().splitlines()) == 1, (args, done.err)
        assert os.path.lexists(path)
        if before is not None:
            path.rmdir() if kind == "folder" else path.unlink()
            path.write_bytes(before)


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        write_text("text", tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
