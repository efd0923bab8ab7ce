"""`syncline train --freeze`: epochs, log lines, cost and pay-back, resuming, and compression on a shaped network."""

import gzip
import json
import re

import pytest

from syncline.cluster.capabilities import capabilities
from syncline.errors import UsageError
from syncline.results.file import load
from syncline.trace import Span
from syncline.train.config import Config, load_recipe, recipes
from syncline.train.session.assemble import restructurings, with_payback
from syncline.train.session.local import run_local
from syncline.train.session.runs import list_runs

SETTINGS = {
    "train.model": "vit(size=tiny, layers=5)",
    "train.data": "shapes(classes='5-9', train=64, test=32, image_size=8)",
    "train.batch": 8,
    "train.steps": 4,
    "train.epochs": 4,
    "train.test_samples": 16,
    "train.device": "cpu",
    "train.threads": 1,
    "train.freeze": "gradnorm(alpha=0.4)",
    "cluster.nproc": 2,
    "compare.strategies": ["syncline"],
}
LINE = re.compile(
    r"rank (\d), epoch (\d), step (\d)/4: data loading [\d.]+ ms, forward [\d.]+ ms, backward [\d.]+ ms,"
    r" [\d.]+ samples/s, [\d.]+ syncs/s, ([\d.]+) MB synchronised"
)


class Listener:
    """A watcher that keeps the log lines and the notes."""

    def __init__(self):
        self.lines, self.notes = [], []

    def note(self, text):
        self.notes.append(text)

    def log(self, line):
        self.lines.append(line)

    def begin(self, run): ...
    def step(self, message): ...
    def end(self, run, result): ...


def train(folder, **changes):
    heard = Listener()
    resume = changes.pop("resume", None)
    config = Config().override({**SETTINGS, **changes})
    path, _ = run_local(config, out=None if resume else folder, watcher=heard, resume=resume)
    results = load(path)
    return results["runs"][0], heard, results


def test_a_run_freezes_says_what_it_costs_and_resumes_with_the_same_state(tmp_path):
    whole, heard, _ = train(tmp_path / "whole", **{"train.log_every": 2, "train.checkpoint_every": 5})
    frozen = [epoch["frozen"] for epoch in whole["epochs"]]
    assert frozen == sorted(frozen)
    assert 0 < frozen[-1] <= 5
    assert all(epoch["accuracy"] is not None and epoch["test_loss"] > 0 for epoch in whole["epochs"])
    lines = [LINE.fullmatch(line) for line in heard.lines]
    assert all(lines), heard.lines
    assert sorted((int(m[1]), int(m[2]), int(m[3])) for m in lines) == [
        (rank, epoch, step) for rank in (0, 1) for epoch in (1, 2, 3, 4) for step in (2, 4)
    ]
    sizes = [float(m[4]) for m in lines if m[1] == "1"]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    changes = whole["restructurings"]
    levels = dict.fromkeys(count for count in frozen if count)
    assert [change["what"] for change in changes] == [f"{count} of 5 blocks" for count in levels]
    assert all(change["kind"] == "freeze" and change["cost_ms"] > 0 for change in changes)
    assert f"<td>freeze</td><td>{changes[0]['what']}</td>" in (tmp_path / "whole" / "report.html").read_text()
    with gzip.open(next((tmp_path / "whole").glob("runs/syncline/trace.json.gz")), "rt") as file:
        spans = [e for e in json.load(file)["traceEvents"] if e.get("name", "").startswith("freeze")]
    assert {event["pid"] for event in spans} >= {0, 1}
    assert all(
        f"{event['name']}".rpartition(", ")[2].startswith(
            ("paid back after", "would be paid back after", "not paid back")
        )
        for event in spans
    )

    # Stopped in the middle of the third epoch, by one epoch less and an older checkpoint.
    train(tmp_path / "cut", **{"train.epochs": 3, "train.checkpoint_every": 5})
    checkpoint = tmp_path / "cut" / "checkpoints" / "step-00000010"
    resumed, _, _ = train(tmp_path, resume=checkpoint, **{"train.checkpoint_every": 5})
    assert resumed["loss"] == whole["loss"]
    assert [epoch["frozen"] for epoch in resumed["epochs"]] == frozen
    assert [epoch["test_loss"] for epoch in resumed["epochs"]] == [epoch["test_loss"] for epoch in whole["epochs"]]
    with pytest.raises(UsageError, match=r"was started with train\.freeze"):
        train(tmp_path, resume=tmp_path / "cut", **{"train.freeze": "schedule"})

    # Fine-tuning: another number of classes, so the head is new.
    few = {
        "train.data": "shapes(classes='0-2', train=64, test=32, image_size=8)",
        "train.start": str(tmp_path / "whole"),
    }
    tuned, heard, _ = train(tmp_path / "tuned", **few, **{"train.epochs": 1, "train.freeze": ""})
    assert heard.notes[-1].endswith("step-00000016; new: net.head.weight, net.head.bias")
    assert tuned["loss"][0] < 3


@pytest.mark.namespaces
def test_freezing_and_compression_together_on_a_shaped_network(tmp_path):
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)
    nodes = {
        "cluster.nproc": 0,
        "cluster.nodes": 2,
        "cluster.bandwidth": "50Mbit",
        "train.freeze": "schedule(alpha=0.4)",
        "train.steps": 8,
        "train.epochs": 2,
    }
    dense, _, _ = train(tmp_path / "dense", **nodes)
    mixed, _, _ = train(tmp_path / "mixed", **nodes, **{"compare.strategies": ["syncline(int8, tune=False)"]})
    for run in (dense, mixed):
        assert run["status"] == "ok"
        assert [epoch["frozen"] for epoch in run["epochs"]] == [2, 4]
        assert run["ranks"][0]["loss"] != run["ranks"][1]["loss"], "ranks train on their own samples"
        assert [change["what"] for change in run["restructurings"]] == ["2 of 5 blocks", "4 of 5 blocks"]
    assert mixed["wire_bytes_per_step"] < 0.6 * dense["wire_bytes_per_step"]
    assert mixed["loss"] == pytest.approx(dense["loss"], rel=0.01), "in every step"
    assert abs(dense["loss"][-1] - dense["loss"][0]) > 0.05 * dense["loss"][0], "training did change the loss"
    (trace,) = (tmp_path / "mixed").glob("runs/*/trace.json.gz")
    with gzip.open(trace, "rt") as file:
        names = {event.get("name", "").split(" ")[0] for event in json.load(file)["traceEvents"]}
    assert {"freeze", "encode", "decode"} <= names, "both are on the timeline"


def test_cost_and_payback_of_changes():
    def span(rank, step, name, ms, unit="x"):
        return Span(rank, "between", name, unit, step, 0, round(ms * 1e6))

    series = [90, 10, 10, 10, 13, 8, 8, 8, 20, 8, 8]
    spans = [span(0, 3, "freeze", 1), span(1, 3, "freeze", 2), span(0, 7, "reshape", 5), span(0, 2, "other", 1)]
    first, second = restructurings(spans, series)
    assert first == {
        "step": 3, "kind": "freeze", "what": "x", "cost_ms": 7.0, "saved_ms": 2, "payback_steps": 3.5, "steps_after": 7,
    }  # fmt: skip
    assert (second["kind"], second["cost_ms"], second["saved_ms"], second["payback_steps"]) == (
        "reshape",
        17.0,
        0,
        None,
    )
    assert restructurings([span(0, 10, "freeze", 1)], series)[0]["saved_ms"] is None, "no step came after it"
    assert restructurings([], series) == []
    resumed = restructurings([span(0, 3, "freeze", 1)], [99, 50, 20, 20, 9, 10, 10], first=2)
    assert resumed[0]["saved_ms"] == 10, "steps before the resume have no spans, and do not count"
    late = with_payback(spans[:1], [{**first, "steps_after": 2}])
    assert late[0].unit == "x, would be paid back after 4", "the run had ended before"
    units = [span.unit for span in with_payback(spans, [first, second])]
    assert units == ["x, paid back after 4 steps"] * 2 + ["x, not paid back", "x"]
    together = restructurings([span(0, 3, "freeze", 1), span(0, 3, "reshape", 4)], [90, 10, 10, 10, 8, 8, 8])
    assert [(row["kind"], row["cost_ms"], row["saved_ms"]) for row in together] == [("freeze", 1, 2), ("reshape", 4, 2)]


def test_recipes_for_freezing_are_valid_and_others_say_what_to_do():
    for name in ("vit-freeze", "bert-freeze", "qa-freeze", "vit-pretrain", "bert-pretrain"):
        assert name in recipes()
        config = load_recipe(name)
        (run,) = list_runs(config, world_size=4)
        assert bool(run.train.freeze) == name.endswith("freeze")
    with pytest.raises(UsageError, match=r"use 'syncline\(...\)' or 'single'"):
        list_runs(Config().override({"train.freeze": "schedule", "compare.strategies": ["ddp"]}), world_size=2)
    with pytest.raises(UsageError, match="did you mean 'schedule'"):
        list_runs(Config().override({"train.freeze": "schedul", "compare.strategies": ["single"]}), world_size=2)
    with pytest.raises(UsageError, match="there is no such folder"):
        list_runs(Config().override({"train.start": "nowhere", "compare.strategies": ["single"]}), world_size=2)
