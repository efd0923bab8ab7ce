"""Every fault a user can meet: a clear line, exit code 2 where it is theirs to mend, nothing lost, nothing left."""

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
from command import Command, results
from forked import Forked, call, launched

SMALL = ("--model", "mlp", "--batch", "8", "--steps", "4", "--nproc", "2", "--set", "train.test_samples=8")


def test_rank_that_raises_ends_all_and_is_named_and_other_strategies_stay(tmp_path):
    args = ("--model", "faulty:raising", "--batch", "8", "--steps", "5", "--nproc", "4", "--out", "run")
    began = time.monotonic()
    done = call("compare", "--strategies", "single,all-reduce,ddp", *args, cwd=tmp_path)
    assert time.monotonic() - began < 60
    assert done.code == 0, done.err
    assert "crashed on rank 1: ArithmeticError: the model broke on purpose" in done.out
    single, reduced, ddp = results(tmp_path / "run")["runs"]
    assert single["status"] == "ok"
    assert len(single["loss"]) == 5
    for crash in (reduced, ddp):
        assert crash["status"] == "crashed"
        assert crash["error"]["rank"] == 1
        assert "_raise" in crash["error"]["traceback"]
        assert len(crash["loss"]) == 2, "the steps before the fault are kept"
    assert "the model broke on purpose" in (tmp_path / "run" / "report.html").read_text()


def test_rank_that_is_killed_is_named(tmp_path):
    args = ("--model", "faulty:killed(rank=2)", "--batch", "8", "--steps", "5", "--nproc", "4", "--out", "run")
    done = call("train", "--strategy", "all-reduce", *args, cwd=tmp_path)
    assert done.code == 1, "the only run crashed"
    (crash,) = results(tmp_path / "run")["runs"]
    assert crash["error"]["rank"] == 2
    assert "SIGKILL" in crash["error"]["summary"]


def test_stuck_rank_ends_at_the_timeout(tmp_path):
    args = ("--model", "faulty:stuck", "--batch", "8", "--steps", "5", "--nproc", "2", "--set", "train.timeout_s=3")
    began = time.monotonic()
    done = call("train", "--strategy", "all-reduce", *args, "--out", "run", cwd=tmp_path)
    assert done.code == 1
    assert time.monotonic() - began < 40
    (crash,) = results(tmp_path / "run")["runs"]
    assert "imed out" in crash["error"]["summary"], crash["error"]["summary"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_interrupted_comparison_keeps_what_had_finished(number, tmp_path):
    args = ("--model", "faulty:slow(seconds=0.15)", "--batch", "8", "--steps", "12", "--nproc", "2", "--out", "run")
    make, where = (Forked, ()) if number == signal.SIGHUP else (Command, ("--nodes", "2"))
    command = make("compare", "--strategies", "single,ddp,ring", *args, *where, cwd=tmp_path)
    command.wait_for("ddp (2 ranks) ...")
    command.wait_for("step 1:")
    os.kill(command.process.pid, number)
    began = time.monotonic()
    command.finish(timeout=30)
    assert command.code == 128 + number
    assert time.monotonic() - began < 30
    assert command.left() == []
    assert [run["strategy"] for run in results(tmp_path / "run")["runs"]] == ["single"]


def test_launched_rank_that_stops_answering_is_named_by_the_others(tmp_path):
    """As a host that vanishes: nobody closes a connection, and the launcher notices nothing."""
    args = ("train", "--strategy", "all-reduce", *SMALL[:-4], "--out", "run", "--set", "train.timeout_s=3")
    ranks = launched(*args, ranks=4, cwd=tmp_path)
    lost = ranks[1].process.pid
    try:
        ranks[0].wait_for("(4 ranks) ...")
        os.kill(lost, signal.SIGSTOP)
        began = time.monotonic()
        for rank in (ranks[0], ranks[2], ranks[3]):
            rank.finish(timeout=40)
            assert rank.code == 1, rank.err
            assert f"pid {lost}) is stopped (SIGSTOP or a debugger)" in rank.err
            assert "Traceback" not in rank.err
        assert time.monotonic() - began < 30
    finally:
        os.kill(lost, signal.SIGKILL)
        ranks[1].finish()
    (crash,) = results(tmp_path / "run")["runs"]
    assert crash["error"]["rank"] == 1
    assert crash["error"]["summary"].startswith("PeerError: waiting for the other ranks: rank 1 ")
    assert ranks[0].left() == []


def test_killed_parent_leaves_no_rank(tmp_path):
    args = ("--model", "faulty:stuck", "--batch", "8", "--steps", "500", "--nproc", "2", "--out", "run")
    with tempfile.TemporaryDirectory() as temporary:  # the path of a socket must be short
        command = Command("train", *args, cwd=tmp_path, TMPDIR=temporary)
        command.wait_for("step 1:")
        assert len(command._alive()) >= 3
        assert list(Path(temporary).glob("pymp-*")), "the forkserver's socket is there"
        time.sleep(1)  # now one rank sleeps, and the other waits for it
        command.process.kill()
        command.finish()
        assert command.left() == []
        assert not list(Path(temporary).glob("pymp-*"))


@pytest.mark.full
def test_two_comparisons_at_once(tmp_path):
    args = ("compare", "--strategies", "all-reduce,ddp", *SMALL[:-2], "--nodes", "2", "--bandwidth", "1Gbit")
    first, second = Command(*args, cwd=tmp_path), Command(*args, cwd=tmp_path)
    for command in (first, second):
        command.finish()
        assert command.code == 0, command.err
        assert command.left() == []
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    losses = [[run["loss"] for run in results(folder)["runs"]] for folder in folders]
    assert losses[0] == losses[1]


def test_busy_port_is_named(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = call("train", "--strategy", "ddp", *SMALL[:-4], cwd=tmp_path, **variables)
    assert done.code == 2, done.err
    assert f"127.0.0.1:{port} is in use" in done.err


def test_half_a_launcher_environment_is_named(tmp_path):
    done = call("train", *SMALL, cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert done.code == 2
    assert "MASTER_ADDR" in done.err


def test_out_that_holds_other_things_is_refused_and_an_earlier_run_is_moved_aside(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    done = call("train", *SMALL, "--out", "mine", cwd=tmp_path)
    assert done.code == 2
    assert "holds files that are not a run" in done.err
    for _ in range(2):
        assert call("train", *SMALL, "--out", "run", cwd=tmp_path).code == 0
    assert results(tmp_path / "run")["runs"][0]["loss"] == results(tmp_path / "run.1")["runs"][0]["loss"]
