"""`bench overhead`: a quick run of real ranks, and the computation of its rows."""

import json

import pytest

from syncline.bench.overhead import run as overhead
from syncline.bench.overhead.rows import row
from syncline.errors import UsageError

TINY = ("--model", "mlp(hidden=16)", "--data", "synthetic(image_size=8)", "--blocks", "2", "--steps", "2")


@pytest.mark.alone
def test_a_quick_run_has_every_way_and_its_ratios(tmp_path, capsys):
    out = tmp_path / "results" / "overhead.json"
    options = ["--device", "cpu", *TINY, "--warm-up", "1", "--codecs", "powersgd(rank=2)", "--out", str(out)]
    assert overhead.main(options) == 0
    shown = capsys.readouterr().out
    result = json.loads(out.read_text())
    rows = {line["way"]: line for line in result["rows"]}
    assert list(rows) == ["alone", "ddp", "syncline", "syncline(powersgd(rank=2))"]
    assert all(way in shown for way in rows)
    assert result["environment"]["torch"]
    assert result["command"].startswith("python -m syncline.bench.overhead --device=cpu")
    assert "--model=mlp(hidden=16)" in result["command"]
    for line in rows.values():
        assert {"step", "cpu", "thread"} == set(line["ratio_to_ddp"])
        assert line["step_ms"]["repetitions"] == 4  # two blocks on two ranks
        assert line["step_ms"]["low"] <= line["step_ms"]["median"] <= line["step_ms"]["high"]
        assert set(line["phases_ms"]) == {"forward", "backward", "step", "zero_grad"}
        assert line["memory_above_alone_of_gradients"]["after_wait"] > -0.01
    assert rows["ddp"]["ratio_to_ddp"]["step"]["median"] == 1
    assert rows["syncline"]["loss"] == pytest.approx(rows["ddp"]["loss"], rel=1e-4)
    # A residual for every gradient, and the warm-started factors.
    assert rows["syncline(powersgd(rank=2))"]["memory_above_alone_of_gradients"]["state"] > 0.9
    assert rows["syncline"]["memory_bytes"]["state"] == 0
    assert rows["syncline"]["plan"] == {"units": 1, "launches": 1}
    assert rows["ddp"]["plan"] == {}


def test_ratios_pair_blocks_of_a_round_and_memory_is_relative_to_alone():
    def seen(times, held):
        empty = {"issue": [], "issue_phases": [], "kept_busy": [], "loss": 1.0, "plan": {"units": 2}}
        memory = {"after_step": held, "after_wait": held, "state": 0}
        return {"step": times, "cpu": times, "thread": times, "phases": [[1.0] * 4] * 2, "memory": memory, **empty}

    ways = {"alone": seen([1.0, 10.0], 300), "ddp": seen([2.0, 20.0], 300), "syncline": seen([3.0, 30.0], 400)}
    found = row("syncline", [{"ways": ways, "gradient_bytes": 100}] * 2)
    assert found["ratio_to_ddp"]["step"] == {"median": 1.5, "low": 1.5, "high": 1.5, "repetitions": 4, "issue": None}
    assert found["above_alone_ms"]["cpu"]["high"] == 20
    assert found["plan"] == {"units": 2}
    assert found["memory_above_alone_of_gradients"] == {"after_step": 1.0, "after_wait": 1.0, "state": 0.0}


def test_invalid_options_are_refused_before_ranks_start():
    with pytest.raises(UsageError, match="did you mean 'powersgd'"):
        overhead.options("cpu", ["powersgdd"])
    with pytest.raises(UsageError, match="ranks 2 or more"):
        overhead.measure(overhead.options("cpu", ranks=1))
