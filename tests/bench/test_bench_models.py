"""`bench models` without ranks: which cells are chosen and run together, their rows, and what a file keeps."""

import io
import json

import pytest
from rich.console import Console

from syncline.bench.models import run as bench
from syncline.bench.models.cells import BANDWIDTHS, SIZES, STRATEGIES, Cell, chosen, contests
from syncline.bench.models.rows import contest_rows
from syncline.bench.models.table import console_tables, page
from syncline.errors import UsageError
from syncline.train.strategies import load
from syncline.train.workload import MODELS

FIELDS = {
    "model", "strategy", "bandwidth", "step_ms", "samples_per_s", "wire_bytes", "peak_memory_bytes", "loss",
    "loss_dense",
}  # fmt: skip


def overlap_row(strategy, rounds, *, error=None, loss=1.0):
    turns = [{"round": number, "step_ms": [ms], "wire_bytes": 10} for number, ms in enumerate(rounds, 1)]
    step = sorted(rounds)[len(rounds) // 2] if rounds else None
    return {
        "strategy": strategy, "turns": turns, "step_ms": step, "step_ms_low": min(rounds, default=None),
        "step_ms_high": max(rounds, default=None), "wire_bytes": 10, "peak_memory_bytes": 1000, "loss_last": loss,
        "loss_dense": 1.0, "compute_ms": 1.0, "status": "crashed" if error else "ok", "error": error,
    }  # fmt: skip


def overlap_result(*rows):
    return {
        "rows": list(rows), "loss_step": 9, "setting": {"batch": 16}, "link": {}, "environment": {"busy_before": 0.5},
    }  # fmt: skip


def test_the_table_is_that_of_hipress():
    assert len(chosen()) == 6 * len(BANDWIDTHS) * len(STRATEGIES)
    assert {name for size in SIZES.values() for name in size} == set(SIZES["paper"])
    for strategy in STRATEGIES:
        load(strategy)
    for size in SIZES.values():
        assert {setting.model.partition("(")[0] for setting in size.values()} <= set(MODELS.names())


def test_words_choose_cells():
    assert {(cell.model, cell.bandwidth) for cell in chosen("vgg19 1Gbit")} == {("vgg19", "1Gbit")}
    assert {cell.strategy for cell in chosen("ddp")} == {"ddp"}
    assert {cell.strategy for cell in chosen("syncline")} == {s for s in STRATEGIES if s.startswith("syncline")}
    with pytest.raises(UsageError, match="fits no cell"):
        chosen("vgg19 resnet50")


def test_contests_hold_one_model_and_network_and_the_reference():
    cells = chosen("lstm 1Gbit")
    (whole,) = contests(cells, [], at_once=20)
    assert list(whole) == cells
    done = [Cell("lstm", "1Gbit", name) for name in STRATEGIES[:-1]]
    assert [[cell.strategy for cell in one] for one in contests(cells, done, at_once=20)] == [["ddp", "syncline(auto)"]]
    assert contests(cells, cells, at_once=20) == []
    parts = contests(cells, [], at_once=4)
    assert all(len(one) <= 4 and one[0].strategy == "ddp" for one in parts)
    assert {cell for one in parts for cell in one} == set(cells)
    assert [one[0].strategy for one in contests(chosen("lstm 1Gbit ddp"), [], at_once=4)] == ["ddp"]


def test_rows_have_paired_ratios_and_losses_beside_dense():
    cells = [Cell("lstm", "1Gbit", name) for name in ("ddp", "byteps", "ring-dgc")]
    failed = {"rank": 1, "summary": "gone", "traceback": ""}
    found = overlap_result(
        overlap_row("local", [1.0]), overlap_row("ddp", [4.0, 40.0]), overlap_row("byteps", [2.0, 10.0], loss=1.5),
        overlap_row("ring-dgc", [], error=failed),
    )  # fmt: skip
    rows = contest_rows(cells, found, measured="now")
    assert all(set(row) >= FIELDS for row in rows)
    assert [row["strategy"] for row in rows] == ["ddp", "byteps", "ring-dgc"]
    assert rows[1]["times_faster_than_ddp"]["rounds"] == [2.0, 4.0]
    assert (rows[1]["loss"], rows[1]["loss_dense"], rows[1]["samples_per_s"]) == (1.5, 1.0, 1600.0)
    assert rows[0]["times_faster_than_ddp"] is None
    assert (rows[2]["status"], rows[2]["samples_per_s"], rows[2]["times_faster_than_ddp"]) == ("crashed", None, None)
    result = {"rows": rows, "warnings": ["busy"], "setting": {"size": "small", "nodes": 2, "rounds": 2}}
    shown = page(result | {"environment": {"cores": 2}})
    assert 'data-chart="models-0"' in shown
    assert "byteps" in shown


def test_a_file_is_continued_and_another_setting_is_refused(tmp_path, monkeypatch):
    asked = []

    def contest(config, turns, *, out, progress):
        names = config.compare.strategies
        asked.append((config.train.model, config.cluster.bandwidth, names))
        return out, overlap_result(*(overlap_row(name, [float(len(asked))]) for name in names))

    monkeypatch.setattr(bench.overlap, "measure", contest)

    def run(only, **more):
        options = bench.Options(size="small", **more)
        file = tmp_path / "models.json"
        result = bench.measure(
            options, only=only, out=tmp_path, save=lambda r: file.write_text(json.dumps(r)), progress=lambda _: None
        )
        return [(row["strategy"], row["bandwidth"], row["step_ms"]) for row in result["rows"]]

    first = run("lstm 10Gbit byteps")
    assert first == [("ddp", "10Gbit", 1.0), ("byteps", "10Gbit", 1.0)]
    assert asked == [("lstm(size=tiny)", "10Gbit", ("local", "ddp", "byteps"))]
    assert run("lstm 10Gbit byteps") == first
    assert len(asked) == 1, "it was done"
    both = run("lstm 1Gbit byteps")
    assert both == [("ddp", "1Gbit", 2.0), ("byteps", "1Gbit", 2.0), *first]
    more = run("lstm 10Gbit auto")
    assert asked[-1][2] == ("local", "ddp", "syncline(auto)")
    assert more[2:] == [*first, ("syncline(auto)", "10Gbit", 3.0)], "the row of ddp stays"
    with pytest.raises(UsageError, match="use another --out"):
        run("lstm 10Gbit", nodes=4)
    (tmp_path / "models.json").write_text("[]")
    with pytest.raises(UsageError, match="is no result of bench models"):
        run("lstm 10Gbit")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"size": "huge"}, "paper or small"), ({"at_once": 1}, "2 or more"), ({"nodes": 1}, "2 to 64")],
)
def test_wrong_options_are_usage_errors(options, message):
    with pytest.raises(UsageError, match=message):
        bench.Options(**options)


def test_a_terminal_of_80_columns_shows_both_losses():
    """With rows as wide as they are in a real run."""
    rows = []
    for strategy in STRATEGIES:
        made = overlap_row(strategy, [1234.5] * 3, loss=3344.171)
        rows.append(made | {"wire_bytes": 932_383_000, "peak_memory_bytes": 643_883_008, "loss_dense": 3470.586})
    cells = [Cell("ugatit", "25Gbit", strategy) for strategy in STRATEGIES]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(console_tables({"rows": contest_rows(cells, overlap_result(*rows), measured="now")}))
    text = console.export_text()
    assert "dense" in text
    assert text.count("3344") == text.count("3471") == len(STRATEGIES)
