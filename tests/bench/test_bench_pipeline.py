"""`bench pipeline`: a quick run of real ranks in every way, its rows, tables and page, and the pretrained weights."""

import json
import math
from pathlib import Path

import pytest
import torch

from syncline.bench.output import write_between, write_json
from syncline.bench.overhead import run as overhead
from syncline.bench.pipeline import run as pipeline
from syncline.bench.pipeline.options import Options, ablation
from syncline.bench.pipeline.pretrain import load_pretrained, pretrain
from syncline.bench.pipeline.rows import epochs_to, payback, rows_of
from syncline.bench.pipeline.table import markdown, page, sentence, text
from syncline.bench.pipeline.throughput import Cell, cells
from syncline.errors import UsageError
from syncline.train.workload import build

SOME = ["ddp", "none", "freeze+pipe+dp+cache", "all"]


@pytest.mark.parametrize("ways", [SOME, pytest.param([way.name for way in ablation(2)], marks=pytest.mark.full)])
def test_a_quick_run_trains_in_every_way_and_hits_the_cache(tmp_path, capsys, monkeypatch, ways):
    out, saved = tmp_path / "pipeline.json", []

    def save(result, path):
        saved.append([row["name"] for row in result["rows"]])
        write_json(result, path=path)

    monkeypatch.setattr(pipeline, "write_json", save)
    batches = [] if ways == SOME else ["--batches", "16"]
    assert pipeline.main(["--quick", "--epochs", "2", "--ways", ",".join(ways), *batches, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ways
    assert saved == [*(ways[:count] for count in range(1, len(ways) + 1)), ways], "after each way, and at the end"
    fields = {"name", "seconds_to_accuracy", "accuracy", "samples_per_s", "peak_memory_bytes", "reshapes"}
    for row in rows.values():
        assert fields <= set(row)
        assert row["samples_per_s"] > 0
        assert row["peak_memory_bytes"] > 0
        assert 0 <= row["accuracy"] <= 1
        assert math.isfinite(row["epochs"][-1]["loss"])
    assert rows["ddp"]["epochs"][0]["loss"] == pytest.approx(rows["none"]["epochs"][0]["loss"], rel=0.5)
    assert [epoch["frozen"] for epoch in rows["none"]["epochs"]] == [0, 0]
    assert rows["freeze+pipe+dp+cache"]["epochs"][0]["offer"].startswith("reshape 2x1 -> ")
    assert all(change["frozen"] == 2 for row in rows.values() for change in row["reshapes"])
    for name in ("freeze+pipe+dp+cache", "all"):
        assert [epoch["frozen"] for epoch in rows[name]["epochs"]] == [0, 2]
        cached = rows[name]["epochs"][-1]["cache"]
        assert cached["misses"] + cached["hits"] + cached["continued"] > 0
        assert cached["wrong"] == cached["damaged"] == 0
    assert {line["name"] for line in result["chunks"]} == ({"DDP", "Pipe+DDP, 2 stages"} if batches else set())
    shown = capsys.readouterr().out
    assert "freeze+pipe+dp+cache" in shown
    assert f'data-chart="shape-{ways.index("all")}"' in page(result)


def _record(seconds, accuracies, frozen=()):
    """A record of one rank: seconds of each epoch, and the accuracy after it."""
    epochs, total = [], 0.0
    for number, (took, accuracy) in enumerate(zip(seconds, accuracies, strict=True)):
        total += took + 1.0
        shape = {"frozen": frozen[number] if frozen else 0, "stages": 2, "replicas": 1}
        epochs.append({"train_s": took, "seconds": total, "change_s": 1.0, "accuracy": accuracy, **shape})
    reshape = {"epoch": 1, "frozen": 2, "from": "2x1", "to": "1x2", "cost_s": 1.0, "at_s": seconds[0]}
    return {
        "epochs": epochs, "seconds": total, "set_up_s": 0.0, "samples_per_s": 100 / total, "peak_memory_bytes": 5,
        "reshapes": [reshape] if frozen else [],
    }  # fmt: skip


def test_rows_compare_times_to_the_same_accuracy(tmp_path):
    none, fast = _record([10, 10, 10], [0.5, 0.8, 0.9]), _record([10, 4, 1], [0.5, 0.7, 0.897], frozen=[0, 2, 4])
    heavy = {**fast, "peak_memory_bytes": 9}
    rows = rows_of(["none", "all"], [[{"none": none, "all": fast}, {"none": none, "all": heavy}]], reference="none")
    assert [row["seconds_to_accuracy"] for row in rows] == [32.0, 17.0]
    assert rows[1]["speedup_to_accuracy"] == pytest.approx(32 / 17)
    assert [row["common_accuracy"] for row in rows] == [0.9, 0.897]
    assert rows[1]["speedup_to_common"] == pytest.approx(32 / 17), "both are there after the last epoch"
    assert rows[1]["points"] == pytest.approx(-0.3)
    assert rows[1]["peak_memory_bytes"] == 9, "of the rank with the most"
    assert rows[1]["reshapes"][0]["payback_s"] == pytest.approx(1.0 * 4 / 6)
    assert payback({"epoch": 1, "cost_s": 1.0}, none["epochs"]) is None, "not faster afterwards"
    result = {
        "rows": rows, "chunks": [], "warnings": [], "reference": "none", "setting": vars(Options()), "environment": {},
        "seeds": [0],
    }  # fmt: skip
    assert sentence(result) == (
        "all reaches the accuracy of none minus half a point 1.88x as fast as none, the accuracy of both 1.88x as fast,"
        " and ends 1.83x as fast with -0.30 points of accuracy."
    )
    slow = {**rows[1], "name": "freeze", "seconds": 1.0, "seconds_to_accuracy": None, "speedup_to_accuracy": None}
    assert sentence({**result, "rows": [*rows, slow]}).startswith("all reaches"), "freeze is fast, and never there"
    assert "2x1 -> 1x2" in text(result)
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- pipeline -->\nold\n<!-- /pipeline -->\nafter\n")
    write_between(document, "pipeline", markdown(result))
    assert "| all | 18 s |" in document.read_text()
    assert "old" not in document.read_text()
    shown = page(result)
    assert 'data-chart="accuracy"' in shown
    assert 'data-chart="shape-1"' in shown
    assert 'data-chart="shape-0"' not in shown, "nothing froze there"


def test_a_file_that_cannot_be_shown_is_one_line(tmp_path, capsys):
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "list.json").write_text("[]")
    for name, why in (("missing.json", "cannot be read"), ("text.json", "cannot be read"), ("list.json", "no result")):
        for command in (pipeline.main, lambda given: overhead.main(["--never-slower", *given])):
            with pytest.raises(SystemExit) as stopped:
                command(["--show", str(tmp_path / name)])
            assert stopped.value.code == 2
            assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["pipeline-cpu", "pipeline-vit-h200", "pipeline-bert-h200"])
def test_the_page_shows_the_committed_result(name):
    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text())
    assert markdown(result) in (root / "docs" / "pipeline.md").read_text()


def test_an_earlier_result_is_put_between_the_marks_that_are_asked_for(tmp_path, capsys):
    earlier = Path(__file__).parents[2] / "benchmarks" / "results" / "pipeline-vit-h200.json"
    document = tmp_path / "page.md"
    document.write_text("<!-- gpu -->\nold\n<!-- /gpu -->\n")
    assert pipeline.main(["--show", str(earlier), "--page", str(document), "--mark", "gpu"]) == 0
    assert "| against ddp-bf16 |" in document.read_text()
    assert "old" not in document.read_text()
    assert "against ddp-bf16" in capsys.readouterr().out


def test_the_accuracy_is_reached_when_the_mean_of_the_seeds_stays_there():
    first = {"none": _record([10] * 4, [0.7, 0.9, 0.84, 0.9]), "all": _record([5] * 4, [0.7, 0.8, 0.91, 0.9])}
    second = {"none": _record([20] * 4, [0.7, 0.9, 0.84, 0.9]), "all": _record([5] * 4, [0.7, 0.97, 0.9, 0.9])}
    rows = rows_of(["none", "all"], [[first], [second]], reference="none")
    assert [row["epochs_to_accuracy"] for row in rows] == [4, 3], "in the second epoch one seed alone has reached it"
    assert rows[0]["seconds_to_accuracy_by_seed"] == [43.0, 83.0]
    assert rows[1]["seconds_to_accuracy"] == 17.0
    assert rows[1]["accuracy_by_epoch"] == pytest.approx([0.7, 0.885, 0.905, 0.9])
    assert epochs_to(0.99, rows[0]["accuracy_by_epoch"]) is None
    early = {"none": _record([10] * 3, [0.7, 0.905, 0.9]), "all": _record([5] * 3, [0.7, 0.8, 0.905])}
    (_, row) = rows_of(["none", "all"], [[early]], reference="none")
    assert row["speedup_to_common"] == pytest.approx(21 / 17), "none is there after two epochs, all after three"


def test_speed_alone_has_no_accuracy():
    rows = rows_of(["none"], [[{"none": _record([1, 1], [None, None])}]], reference="none")
    assert rows[0]["accuracy"] is rows[0]["seconds_to_accuracy"] is rows[0]["points"] is None
    assert rows[0]["speedup"] == 1


def test_the_cells_of_ddp_against_pipelines():
    assert cells(2, (4,)) == [Cell(0, 0, 4), Cell(2, 2, 4), Cell(2, 4, 4)]
    assert {cell.stages for cell in cells(4, (64,))} == {0, 2, 4}


def test_pretrained_weights_are_plain_tensors_and_the_new_head_stays(tmp_path):
    options = Options(**{**pipeline.QUICK, "pretrain": "shapes(classes='0-2', train=64, test=32)"})
    pretrain(options, tmp_path / "w.pt", progress=lambda line: None)
    module = build(options.model, options.data, seed=3).phases[0].module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert load_pretrained(module, tmp_path / "w.pt") == len(before) - 2
    changed = [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])]
    assert not [name for name in changed if "head" in name]
    assert len(changed) > 10


def test_mistakes_have_one_sentence():
    with pytest.raises(UsageError, match="use a divisor of --ranks"):
        pipeline.options_for({"stages": 3})
    with pytest.raises(UsageError, match="no way to train 'al'"):
        pipeline.options_for({"ways": ("al",)})
    with pytest.raises(UsageError, match="no way to train 'dp'"):
        pipeline.options_for({"reference": "dp"})


def test_ways_run_in_the_order_asked_for():
    assert [way.name for way in Options(ways=("all", "ddp")).chosen()] == ["all", "ddp"]


def test_pretraining_can_have_another_head(tmp_path):
    options = Options(
        model="bert(size=tiny, layers=2)", pretrain_model="bert(size=tiny, layers=2, head=pretraining)",
        data="text(megabytes=0.3, classes=2)", pretrain="text(megabytes=0.1)", pretrain_epochs=1, batch=32,
    )  # fmt: skip
    pretrain(options, tmp_path / "w.pt", progress=lambda line: None)
    module = build(options.model, options.data, seed=3).phases[0].module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    load_pretrained(module, tmp_path / "w.pt")
    changed = [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])]
    heads = [name for name in before if name not in changed]
    assert 0 < len(heads) < 8, f"the classifier alone stays: {heads}"
