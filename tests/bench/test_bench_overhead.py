"""`bench overhead`: a quick run of real ranks, and the computation of its rows."""

import json

import pytest

from syncline.bench.overhead import never_slower
from syncline.bench.overhead import run as overhead
from syncline.bench.overhead.never_slower import claim_of
from syncline.bench.overhead.rows import against_rival, row
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
    plan = rows["syncline"]["plan"]
    assert (plan["units"], plan["launches"], plan["codecs"]) == (1, 1, "none")
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


def test_the_rival_is_the_best_ddp_that_sends_the_same():
    def seen(times):
        return {"step": times, "cpu": [2 * time for time in times]}

    ways = {
        "ddp": seen([4.0, 8.0]),
        "ddp(bucket_mb=5)": seen([2.0, 4.0]),
        "ddp-bf16": seen([1.0, 2.0]),
        "syncline": seen([2.0, 2.0]),
        "syncline(bf16)": seen([3.0, 6.0]),
        "syncline(auto)": seen([1.0, 1.0]),
    }
    found = {name: against_rival(name, [{"ways": ways}]) for name in ("syncline", "syncline(bf16)", "syncline(auto)")}
    assert {name: line["rival"] for name, line in found.items()} == {
        "syncline": "ddp(bucket_mb=5)",
        "syncline(bf16)": "ddp-bf16",
        "syncline(auto)": "ddp-bf16",
    }
    assert found["syncline"]["step"]["median"] == 0.75, "1 and 0.5, by round"
    assert found["syncline(bf16)"]["cpu"]["median"] == 3
    cell = never_slower.Cell("resnet50", 2)
    claims = [claim_of(cell, line["way"], line["rival"], line["step"], 1.02) for line in found.values()]
    assert [claim["held"] for claim in claims] == [True, False, True]
    heads, lines = never_slower.table({"rows": claims})
    assert lines[1] == ["resnet50", "2", "loopback", "syncline(bf16)", "ddp-bf16", "3.000", "3.00-3.00", "1.02", "no"]
    assert len(heads) == len(lines[0])


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_quick_comparison_with_the_best_ddp(tmp_path):
    out = tmp_path / "never-slower.json"
    assert overhead.main(["--never-slower", "--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {claim["network"] for claim in result["rows"]} == {"loopback", "200Mbit"}
    assert [line["cached"] for line in result["first_steps"][0]["rows"]] == [False, False, True, True]
    assert all("earlier run" in text for line in result["first_steps"][0]["rows"][2:] for text in line["tuning"])


def test_invalid_options_are_refused_before_ranks_start():
    with pytest.raises(UsageError, match="did you mean 'powersgd'"):
        overhead.options("cpu", ["powersgdd"])
    with pytest.raises(UsageError, match="ranks 2 or more"):
        overhead.measure(overhead.options("cpu", ranks=1))
