"""`syncline train --pipe --dp --cache --freeze`: the losses of a single process, reshapes on the timeline, resuming."""

import gzip
from types import SimpleNamespace

import pytest
from test_freeze_runs import train

from syncline.errors import UsageError
from syncline.pipeline.mesh import Shape
from syncline.trace.span import STAGES
from syncline.train.checkpoint import files as checkpoint_files
from syncline.train.config import Config
from syncline.train.session.runs import list_runs
from syncline.train.strategies.pipeline import Piped

FREEZE = {"train.freeze": "schedule(alpha=0.5)", "train.epochs": 3}
PIPELINE = {"train.pipe": 2, "train.dp": True, "train.cache": "20MB", "train.model": "faulty:reshaped"}


def test_a_shrinking_pipeline_trains_like_a_single_process_and_resumes(tmp_path):
    single, _, _ = train(tmp_path / "single", **FREEZE, **{"compare.strategies": ["single"]})
    whole, heard, _ = train(
        tmp_path / "whole", **FREEZE, **PIPELINE, **{"train.checkpoint_every": 6, "train.log_every": 4}
    )
    assert whole["loss"] == pytest.approx(single["loss"], rel=1e-4)
    for ours, theirs in zip(whole["epochs"], single["epochs"], strict=True):
        assert ours["frozen"] == theirs["frozen"]
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
        assert ours["accuracy"] == theirs["accuracy"]
    assert [change["kind"] for change in whole["restructurings"]].count("reshape") >= 1
    trace = gzip.decompress(next((tmp_path / "whole").glob("runs/*/trace.json.gz")).read_bytes()).decode()
    assert f'"{STAGES}"' in trace, "waits for other stages are on the timeline"
    assert len(heard.lines) == 6
    assert whole["wire"]["theory_bytes"] is None, "no formula has stages that change"

    train(tmp_path / "cut", **{**FREEZE, "train.epochs": 2}, **PIPELINE, **{"train.checkpoint_every": 6})
    checkpoint = tmp_path / "cut" / "checkpoints" / "step-00000006"
    (kept,) = checkpoint_files.read(checkpoint, 0)["pipelines"]
    assert {"frozen", "stages", "micro_batches", "trying_shapes", "steps"} == set(kept)
    resumed, _, _ = train(tmp_path, resume=checkpoint, **FREEZE, **PIPELINE, **{"train.checkpoint_every": 6})
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert [epoch["frozen"] for epoch in resumed["epochs"]] == [epoch["frozen"] for epoch in whole["epochs"]]


def test_a_run_resumes_with_the_stages_that_are_asked_for(tmp_path):
    settings = {"train.steps": 3, "train.checkpoint_every": 3, "train.model": "faulty:reshaped"}
    train(tmp_path, **settings, **{"train.epochs": 1, "train.pipe": 2})
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    resumed, _, results = train(tmp_path, resume=checkpoint, **settings, **{"train.epochs": 2, "train.pipe": 1,
                                                                            "train.cache": "1MB"})  # fmt: skip
    single, _, _ = train(tmp_path / "single", **settings, **{"train.epochs": 2, "compare.strategies": ["single"]})
    assert resumed["loss"] == pytest.approx(single["loss"], rel=1e-4)
    assert resumed["synchronised_bytes"] > 0, "two replicas, not two stages"
    assert any("used --pipe 2; the stages are now those of --pipe 1" in line for line in results["warnings"])


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_resumes_with_its_buffers_and_tied_weights_as_a_pipeline_and_without_one(tmp_path, first, then):
    settings = {"train.steps": 2, "train.checkpoint_every": 2, "train.model": "faulty:with_buffer",
                "train.optimizer": "sgd(lr=1e-9)", "train.freeze": "none"}  # fmt: skip
    train(tmp_path, **settings, **{"train.epochs": 1, "train.pipe": first})
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    resumed, _, _ = train(tmp_path, resume=checkpoint, **settings, **{"train.epochs": 2, "train.pipe": then})
    single, _, _ = train(tmp_path / "single", **settings, **{"train.epochs": 2, "compare.strategies": ["single"]})
    assert resumed["loss"][2:] == pytest.approx(single["loss"][2:], rel=1e-5), "the buffer was kept"
    assert resumed["loss"][2] != pytest.approx(resumed["loss"][0], rel=1e-4), "and it matters"


def test_a_cache_knows_the_epochs_that_are_left():
    piped = object.__new__(Piped)
    piped._cache, piped._followed = SimpleNamespace(epochs=10.0), 0
    piped._blocks = SimpleNamespace(frozen=lambda: 0)
    piped.follow_freeze(step_s=1.0, steps_left=3, epochs_left=1.5, save=None)
    assert piped._cache.epochs == 1.5


def test_a_shape_that_the_first_steps_choose_trains_like_a_single_process(tmp_path):
    settings = {**FREEZE, "train.steps": 8, "train.dp": True, "train.cache": "20MB"}
    single, _, _ = train(tmp_path / "single", **{**settings, "train.dp": False, "train.cache": ""},
                         **{"compare.strategies": ["single"]})  # fmt: skip
    chosen, _, _ = train(tmp_path / "chosen", **settings, **{"train.pipe": 0})
    assert chosen["loss"] == pytest.approx(single["loss"], rel=1e-4)
    assert [epoch["frozen"] for epoch in chosen["epochs"]] == [epoch["frozen"] for epoch in single["epochs"]]


def test_every_step_asks_for_its_shape_first():
    piped = object.__new__(Piped)

    def tune_shape():
        piped.pipe.replica, piped.pipe.shape = 1, Shape(1, 2)

    piped.pipe = SimpleNamespace(replica=0, shape=Shape(2, 1), tune_shape=tune_shape)
    assert piped.part() == (1, 2), "the part of the new shape"


def test_what_no_pipeline_can_do_is_refused():
    def runs(**changes):
        return list_runs(
            Config().override({key.replace("__", "."): value for key, value in changes.items()}), world_size=4
        )

    with pytest.raises(UsageError, match="'ddp' has no pipeline"):
        runs(train__pipe=2, compare__strategies=["ddp"])
    with pytest.raises(UsageError, match="4 ranks do not divide into pipelines of 3 stages"):
        runs(train__pipe=3, compare__strategies=["syncline"])
    with pytest.raises(UsageError, match="use another policy with --pipe"):
        runs(train__pipe=2, train__freeze="plasticity", compare__strategies=["syncline"])
    with pytest.raises(UsageError, match="leave every out"):
        runs(train__cache="1MB", train__freeze="schedule(every=9)", compare__strategies=["syncline"])
    with pytest.raises(UsageError, match="--pipe must be 0 or more"):
        runs(train__pipe=-1, compare__strategies=["syncline"])
