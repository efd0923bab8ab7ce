"""`syncline bench overlap` and `bench models` on two emulated nodes: turns, a crash that only loses itself."""

import json
import os
import signal
from itertools import pairwise

import pytest
from command import run
from forked import Forked, call

SMALL = ("--model", "mlp(hidden=16)", "--batch", "8", "--nodes", "2", "--bandwidth", "1Gbit", "--seconds", "0.2")


@pytest.mark.alone
@pytest.mark.namespaces
def test_contestants_take_turns_and_one_that_crashes_loses_only_itself(tmp_path):
    names = ("local", "ddp", "turns:Raising", "syncline(powersgd(rank=2))")
    args = (*SMALL, "--rounds", "2", "--steps", "4", "--out", "b", "--json", "--strategies", ",".join(names))
    done = run("bench", "overlap", *args, cwd=tmp_path)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result == json.loads((tmp_path / "b" / "overlap.json").read_text())
    rows = {row["strategy"]: row for row in result["rows"]}
    assert tuple(rows) == names
    broken = rows.pop("turns:Raising")
    assert (broken["status"], broken["error"]["rank"]) == ("crashed", 1)
    assert "ArithmeticError: broke on purpose" in broken["error"]["summary"]
    for row in rows.values():
        assert row["status"] == "ok"
        assert [turn["round"] for turn in row["turns"]] == [1, 2]
        assert all(len(turn["step_ms"]) == turn["steps"] - turn["lead"] - 1 for turn in row["turns"])
        steps = row["warm_up"]["steps"] + 1 + sum(turn["steps"] for turn in row["turns"])
        assert len(row["losses"]) == steps
        assert row["to_bound"] > 0
    # The second round goes backwards, and no turn begins before the one before it has ended.
    turns = sorted((turn["began"], turn["ended"], name) for name, row in rows.items() for turn in row["turns"])
    order = [names[0], names[1], names[3]]
    assert [name for *_, name in turns] == [*order, *reversed(order)]
    assert all(before[1] <= after[0] for before, after in pairwise(turns))
    ours = rows["syncline(powersgd(rank=2))"]
    assert ours["times_faster_than"]["ddp"]["against"] == "ddp"
    assert len(ours["times_faster_than"]["ddp"]["rounds"]) == 2
    assert ours["predicted_ms"] > 0
    assert ours["plans"][0]["codecs"]["powersgd(rank=2)"]["units"] > 0
    assert rows["ddp"]["wire_bytes"] > 200_000 > rows["local"]["wire_bytes"]
    assert rows["ddp"]["loss_last"] == pytest.approx(ours["loss_dense"])
    assert 8e8 < result["link"]["measured_bits_per_s"] < 1e9
    page = (tmp_path / "b" / "overlap.html").read_text()
    assert 'data-chart="steps"' in page
    assert 'id="trace-1"' in page
    assert "broke on purpose" in page
    assert (tmp_path / "b" / "runs" / "ddp" / "trace.json.gz").exists()


def test_interrupted_it_keeps_what_was_measured(tmp_path):
    args = ("--model", "mlp(hidden=16)", "--batch", "8", "--nproc", "2", "--strategies", "local,ddp", "--out", "b")
    command = Forked("bench", "overlap", *args, "--rounds", "1000", "--seconds", "0.1", cwd=tmp_path)
    command.wait_for("round 2 of 1000")
    os.kill(command.process.pid, signal.SIGINT)
    command.finish(timeout=30)
    assert command.code == 130
    assert command.left() == []
    result = json.loads((tmp_path / "b" / "overlap.json").read_text())
    assert result["rounds_done"] >= 1
    assert all(row["turns"] for row in result["rows"])


def test_what_only_a_rank_can_see_is_one_line_and_leaves_nothing(tmp_path):
    args = ("--model", "mpl", "--batch", "8", "--nproc", "2", "--strategies", "local,ddp", "--out", "b")
    done = call("bench", "overlap", *args, cwd=tmp_path)
    assert done.code == 2, done.err
    assert "did you mean 'mlp'" in done.err
    assert not (tmp_path / "b").exists()


@pytest.mark.full  # the same contestants as above
@pytest.mark.alone
@pytest.mark.namespaces
def test_models_measures_the_chosen_cells(tmp_path):
    done = run("bench", "models", "--quick", "--only", "byteps", "--out", "m", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [row["strategy"] for row in result["rows"]] == ["ddp", "byteps"]
    for row in result["rows"]:
        assert (row["model"], row["bandwidth"], row["status"]) == ("lstm", "1Gbit", "ok")
        assert min(row[key] for key in ("step_ms", "samples_per_s", "wire_bytes", "peak_memory_bytes", "loss")) > 0
        assert row["loss"] == pytest.approx(row["loss_dense"], rel=1e-3), "both average without loss"
    assert (tmp_path / "m" / "models.html").exists()
