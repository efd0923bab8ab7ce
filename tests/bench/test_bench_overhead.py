"""`bench overhead`: a quick run of real ranks, and the computation of its rows."""

import json
from pathlib import Path

import pytest

from syncline.bench.output import markdown_table
from syncline.bench.overhead import gpu_claims, never_slower
from syncline.bench.overhead import run as overhead
from syncline.bench.overhead.rows import against_rival, row
from syncline.errors import UsageError

TINY = ("--model", "mlp(hidden=16)", "--data", "synthetic(image_size=8)", "--blocks", "2", "--steps", "2")


@pytest.mark.full
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
    found = {name: against_rival(name, [[{"ways": ways}]]) for name in ("syncline", "syncline(bf16)", "syncline(auto)")}
    assert {name: line["rival"] for name, line in found.items()} == {
        "syncline": "ddp(bucket_mb=5)",
        "syncline(bf16)": "ddp-bf16",
        "syncline(auto)": "ddp-bf16",
    }
    assert found["syncline"]["step"]["median"] == 0.75, "1 and 0.5, by round"
    assert found["syncline(bf16)"]["cpu"]["median"] == 3
    cell = {"model": "resnet50", "ranks": 2, "network": "loopback", "against": list(found.values())}
    claims = never_slower.claims(cell)
    assert [claim["held"] for claim in claims] == [True, False, True, True, False]
    heads, lines = never_slower.table({"rows": claims})
    where = ["resnet50", "2", "loopback", "syncline(bf16)"]
    assert lines[1] == [*where, "best DDP: ddp-bf16", "3.000", "3.00-3.00", "1.02", "no"]
    assert lines[4] == [*where, "CPU time of ddp-bf16", "3.000", "3.00-3.00", "1.02", "no"]
    assert len(heads) == len(lines[0])


def test_luck_does_not_choose_the_rival():
    lucky = {"step": [1.0, 1.0, 4.0, 4.0], "cpu": [1.0] * 4}
    steady = {"step": [2.0] * 4, "cpu": [1.0] * 4}
    ways = {"ddp": lucky, "ddp(bucket_mb=5)": steady, "syncline": steady}
    found = against_rival("syncline", [[{"ways": ways}]])
    assert found["rival"] == "ddp / ddp(bucket_mb=5)"
    assert found["step"]["median"] == 0.75, (
        "0.5 twice, where ddp was slow, and 1 twice: ddp's lucky rounds do not count"
    )


def test_a_start_whose_memory_lies_well_does_not_choose_the_rival():
    def ways(ddp):
        times = {"ddp": ddp, "ddp(bucket_mb=5)": 2.0, "syncline": 2.0}
        return [{"ways": {name: {"step": [time] * 4, "cpu": [time] * 4} for name, time in times.items()}}]

    found = against_rival("syncline", [ways(1.0), ways(4.0)])
    assert found["rival"] == "ddp / ddp(bucket_mb=5)"
    assert found["step"]["median"] == 0.75, "0.5, where ddp was slow after it was the faster one, and 1"


def test_a_part_of_the_cells_is_measured_again(tmp_path, monkeypatch):
    asked, ratio = [], {"median": 1.0, "low": 0.9, "high": 1.1}

    def found(cell, progress):
        asked.append(cell.label)
        line = {"way": "syncline(auto)", "rival": "ddp", "step": {**ratio, "median": float(len(asked))}}
        place = {"label": cell.label, "model": cell.model, "ranks": cell.ranks, "network": cell.network}
        return {**place, "busy_before": 0.2 * cell.ranks, "against": [line]}

    monkeypatch.setattr(never_slower, "_found", found)
    out, page = tmp_path / "never-slower.json", tmp_path / "page.md"
    page.write_text("<!-- never-slower -->\n<!-- /never-slower -->\n")
    assert overhead.main(["--never-slower", "--out", str(out)]) == 0
    cells = [cell.label for cell in never_slower.CELLS]
    assert asked == cells == [one["label"] for one in json.loads(out.read_text())["cells"]]
    assert len(set(cells)) == len(cells)
    assert overhead.main(["--never-slower", "--only", "200Mbit", "--out", str(out), "--page", str(page)]) == 0
    again = [label for label in cells if "200Mbit" in label]
    assert asked[len(cells) :] == again
    result = json.loads(out.read_text())
    assert [one["label"] for one in result["cells"]] == cells, "the others are kept, in their order"
    medians = [claim["ratio"]["median"] for claim in result["rows"]]
    assert sorted(medians)[-len(again) :] == [len(cells) + 1 + i for i in range(len(again))]
    assert result["warnings"][0].startswith(f"{cells[0]}: other programs use 40%")
    assert page.read_text().count("syncline(auto)") == len(cells)
    with pytest.raises(SystemExit):
        overhead.main(["--never-slower", "--only", "token ring"])


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_quick_comparison_with_the_best_ddp(tmp_path):
    out = tmp_path / "never-slower.json"
    assert overhead.main(["--never-slower", "--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {claim["network"] for claim in result["rows"]} == {"loopback", "200Mbit"}
    first = result["cells"][-1]["first_steps"]
    assert [line["cached"] for line in first] == [False, False, True, True]
    assert all("earlier run" in text for line in first[2:] for text in line["tuning"])


def test_invalid_options_are_refused_before_ranks_start():
    with pytest.raises(UsageError, match="did you mean 'powersgd'"):
        overhead.options("cpu", ["powersgdd"])
    with pytest.raises(UsageError, match="ranks 2 or more"):
        overhead.measure(overhead.options("cpu", ranks=1))


def test_claims_about_a_gpu_compare_with_torchs_own_and_with_training_alone():
    cell = gpu_claims.FREE[0]
    times = {"alone": 1.0, "ddp": 4.0, "ddp-bf16": 3.0, "ddp-powersgd(rank=4)": 6.0}
    times |= {"ddp-powersgd(rank=32)": 8.0, "syncline": 4.0, "syncline(auto)": 3.3}
    times |= {"syncline(powersgd(rank=4))": 3.0, "syncline(powersgd(rank=32) | bf16)": 12.0}
    assert set(times) == set(cell.ways)

    def seen(way):
        steps, peak = [times[way], 2 * times[way]], {"alone": 300, "ddp": 320, "syncline": 325}.get(way, 600)
        memory = {"after_step": peak, "after_wait": peak, "peak": peak, "state": 0}
        empty = {"kept_busy": [True] * 2, "loss": 1.0, "plan": {}, "issue_phases": [[1.0] * 4] * 2}
        phases = {"phases": [[1.0] * 4] * 2, "memory": memory, **empty}
        return {"step": steps, "cpu": steps, "thread": steps, "issue": [10 * t for t in steps], **phases}

    record = {"ways": {way: seen(way) for way in cell.ways}, "gradient_bytes": 100, "tensors": 161}
    rows = [row(way, [record]) for way in cell.ways]
    claims = gpu_claims.claims_of(cell, [record], rows)
    found = {(claim["way"], claim["against"]): (claim["value"]["median"], claim["held"]) for claim in claims}
    low, high = "syncline(powersgd(rank=4))", "syncline(powersgd(rank=32) | bf16)"
    peak = "peak memory above alone, in gradients"
    assert found == {
        ("syncline", "step of ddp"): (1.0, True),
        ("syncline(auto)", "step of ddp-bf16"): (pytest.approx(1.1), False),
        (low, "step of ddp-powersgd(rank=4)"): (0.5, True),
        (high, "step of ddp-powersgd(rank=32)"): (1.5, False),
        ("syncline", "issue ms above ddp"): (0.0, True),
        (low, "issue ms"): (45.0, True),
        (high, "issue ms"): (180.0, False),
        ("syncline", peak): (0.25, True),
        (low, peak): (3.0, False),
        (high, peak): (3.0, False),
    }
    shaped = gpu_claims.chosen("resnet50", "1Gbit")[0]
    few = {"ways": {way: seen(way) for way in shaped.ways}}
    (line,) = gpu_claims.claims_of(shaped, [few], [])
    assert (line["way"], line["limit"], line["held"]) == ("syncline(auto)", 1.0, False)
    heads, lines = gpu_claims.table({"rows": [{"model": "resnet50", "network": "1Gbit", **line}]})
    assert lines == [["resnet50", "1Gbit", "syncline(auto)", "step of ddp-bf16", "1.100", "1.10-1.10", "1.00", "no"]]
    assert len(heads) == len(lines[0])
    shown = {"network": "1Gbit", "rows": [row(way, [{**few, "gradient_bytes": 1}]) for way in shaped.ways]}
    claimed = {"model": "resnet50", "network": "1Gbit", **line}
    page = gpu_claims.page({"environment": {"device": "H200"}, "cells": [shown], "rows": [claimed]})
    assert all(text in page for text in ("Never slower than torch", "syncline(auto)", "4.95", "H200"))
    with pytest.raises(UsageError, match="choose from resnet50 unshaped"):
        gpu_claims.chosen("resnet51")


def test_the_page_shows_the_committed_claims():
    root = Path(__file__).parents[2]
    results, shown = root / "benchmarks" / "results", (root / "docs" / "bench.md").read_text()
    result = json.loads((results / "never-slower-cpu.json").read_text())
    assert markdown_table(*never_slower.table(result)) in shown
    assert gpu_claims.markdown(json.loads((results / "overhead-h200.json").read_text())) in shown
    assert result["rows"] == [line for found in result["cells"] for line in never_slower.claims(found)]
    assert [found["label"] for found in result["cells"]] == [cell.label for cell in never_slower.CELLS]
