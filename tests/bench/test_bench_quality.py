"""`bench quality`: trainings against a plain loop and on real ranks, finished ones that are kept, and the verdicts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from syncline.bench.quality import lockstep, on_ranks, run, table, training
from syncline.bench.quality.rows import summarize
from syncline.bench.quality.tasks import AUTO, BASE, DENSE, TASKS, Job, chosen_tasks, codecs_of, jobs
from syncline.errors import UsageError
from syncline.results.file import strict
from syncline.spec import parse_one
from syncline.train.data import DATA
from syncline.train.data.sampler import Sampler
from syncline.train.models import MODELS
from syncline.train.workload import build, load_optimizer

TINY = Job(BASE, DENSE, 0, "mlp(hidden=16)", "shapes(train=64, test=32)", "sgd(lr=0.05, momentum=0.9)", 16, 6)


def silent(*_):
    """No progress."""


def test_dense_in_lockstep_is_the_plain_loop_on_the_whole_batch():
    workload = build(TINY.model, TINY.data, seed=0)
    (phase,) = workload.phases
    optimizer = load_optimizer(TINY.optimizer, phase.module.parameters())
    sampler, losses = Sampler(64, batch=16, seed=0), []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / 6)
        epoch, indices = sampler(step)
        optimizer.zero_grad()
        loss = phase.module(*workload.train.batch(indices, epoch=epoch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    made = lockstep.train(TINY, silent)
    assert made["loss"]["train"] == pytest.approx(losses, rel=1e-4)
    parameters = sum(p.numel() for p in phase.module.parameters())
    assert made["bytes_per_step"] == 4 * parameters
    right, count = workload.evaluate(workload.test.batch(torch.arange(32)))
    assert made["accuracy"] == pytest.approx(right / count)


@pytest.mark.parametrize("codec", [DENSE, AUTO])
def test_real_ranks_train_as_lockstep_does_and_are_timed(codec):
    job = replace(TINY, codec=codec, network=on_ranks.LOOPBACK)
    steps = []
    made = on_ranks.train(job, steps.append)
    assert steps == list(range(1, 7))
    assert made["seconds"] == sorted(made["seconds"])
    assert len(made["seconds"]) == 6
    assert sum(made["chosen"].values()) == pytest.approx(1)
    # With six steps, auto has planned nothing yet.
    assert made["loss"]["train"] == pytest.approx(lockstep.train(TINY, silent)["loss"]["train"], rel=1e-3)


def test_finished_trainings_are_kept_and_not_repeated(tmp_path, monkeypatch):
    file = tmp_path / "quality.json"
    trainings = [TINY, replace(TINY, codec="int8")]
    first = run.measure(trainings, file, progress=silent)
    more = [replace(one, seed=1) for one in trainings]
    trained = []
    monkeypatch.setattr(lockstep, "train", lambda job, done: trained.append(job) or training_row(job, 0.5))
    result = run.measure([*trainings, *more], file, progress=silent)
    assert trained == more
    assert result["rows"][:2] == first["rows"]
    assert json.loads(file.read_text())["rows"] == result["rows"]
    assert [row["seeds"] for row in result["summary"]] == [[0, 1], [0, 1]]
    with pytest.raises(UsageError, match="with steps 6, not 7: use another --out"):
        run.measure([replace(TINY, steps=7)], file, progress=silent)
    with pytest.raises(UsageError, match=r"with optimizer sgd.*, not adam: use another --out"):
        run.measure([replace(TINY, optimizer="adam")], file, progress=silent)
    file.write_text("[]")
    with pytest.raises(UsageError, match="is not a file of bench quality"):
        run.measure([TINY], file, progress=silent)


def training_row(job, accuracy, loss=1.0, **more):
    losses = {"train": [loss] * job.steps}
    return training.row(job, losses, score=(accuracy, loss), bytes_per_step=100.0, **more)


@pytest.mark.parametrize(
    ("codec", "lost", "says"),
    [
        ("int8", (0.1, -0.1, 0.2), "equal"),
        ("int8", (-0.9, 0.9, 0.0), "within the noise"),
        ("int8", (0.4, 0.5, 0.6), "within the limit"),
        ("int8", (2.0, 2.1, 1.9), "worse"),
        ("int8", (0.0, 0.1, 6.0), "unclear"),
        ("int8", (-1.0, -1.1, -0.9), "better"),
        ("auto", (0.5, 0.51, 0.49), "worse"),
        ("int8", (0.3,), "one seed"),
        (DENSE, (0.0, 0.0, 0.0), "dense"),
    ],
)
def test_a_verdict_compares_runs_of_the_same_seed(codec, lost, says):
    dense = [training_row(replace(TINY, seed=seed), 0.8 + seed / 100) for seed in range(4)]
    mine = [
        training_row(replace(TINY, codec=codec, seed=seed), 0.8 + seed / 100 - points / 100)
        for seed, points in enumerate(lost)
    ]
    summary = {row["codec"]: row for row in summarize(mine if codec == DENSE else [*dense, *mine])}
    assert summary[codec]["verdict"] == says
    assert summary[codec]["points"] == pytest.approx(sum(lost) / len(lost))


def test_without_an_accuracy_the_loss_decides_and_nan_is_seen():
    made = [
        training.row(replace(TINY, codec=codec, seed=seed), {"d": [1.0] * 6, "g": [loss] * 6}, score=(None, None))
        for codec, loss in ((DENSE, 2.0), ("int8", 2.1), ("topk", float("nan")))
        for seed in (0, 1)
    ]
    # A file has null for a loss that is not finite.
    summary = {row["codec"]: row for row in summarize(strict(made))}
    assert summary["int8"]["loss_percent"] == pytest.approx(5)
    assert summary["int8"]["verdict"] == "worse"
    assert summary["topk"]["verdict"] == "diverged"


def test_every_task_has_a_dense_run_for_each_codec_and_seed():
    made = jobs(list(TASKS), asked=None, seeds=(0, 1), size="small", network="100Mbit", on_ranks=False, changes={})
    assert len(made) == len(set(made))
    for job in made:
        assert replace(job, codec=DENSE, optimizer=dense_optimizer(job)) in made
        assert bool(job.network) == (job.codec == AUTO or (job.codec == DENSE and job.network == "100Mbit"))
    assert {"tbq", "randomk", "warmup(topk(0.01), steps=100)"} <= set(codecs_of(BASE, None))
    assert chosen_tasks(["all"]) == list(TASKS)
    with pytest.raises(UsageError, match="vgg"):
        chosen_tasks(["vg"])
    for size in ("small", "full"):
        for task in TASKS.values():
            chosen = getattr(task, size)
            assert parse_one(chosen.model).name in MODELS.names()
            assert parse_one(chosen.data).name in (*DATA.names(), "images")


def dense_optimizer(job):
    return TASKS[job.task].small.optimizer


@pytest.mark.parametrize(
    "task", [name if name in ("gan", "bert") else pytest.param(name, marks=pytest.mark.full) for name in TASKS]
)
def test_a_task_trains(task, monkeypatch):
    monkeypatch.setattr(training, "TEST_SAMPLES", 20)
    changes = {"steps": 2, "batch": 4, "pretrain_steps": 2 if TASKS[task].small.pretrain else 0}
    (job, *_) = jobs([task], asked=["int8"], seeds=(0,), size="small", network="", on_ranks=False, changes=changes)
    made = lockstep.train(job, silent)
    assert set(asdict(job)) <= set(made)
    assert set(made["loss"]) == ({"discriminator", "generator"} if task == "gan" else {"train"})
    assert (made["accuracy"] is None) == (task == "gan")


def test_the_page_has_a_chart_for_each_codec_and_phase():
    trainings = [replace(TINY, codec=codec, seed=seed) for codec in (DENSE, "int8") for seed in (0, 1)]
    rows = [training_row(job, 0.5 if job.codec == DENSE else 0.4) for job in trainings]
    timed = [
        training_row(replace(job, network="100Mbit"), 0.5, seconds=[0.1 * n for n in range(1, 7)]) for job in trainings
    ]
    result = {"environment": {"torch": "2"}, "rows": [*rows, *timed], "summary": summarize([*rows, *timed])}
    page = table.page(result)
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [plot["title"] for plot in data["plots"]] == ["int8", "int8"]
    assert [len(plot["series"]) for plot in data["plots"]] == [4, 4]
    assert [plot["x"]["name"] for plot in data["plots"]] == ["step", "seconds"]
    assert "over seconds" in page
    assert table.page(strict(result | {"rows": [training_row(job, 0.5, float("nan")) for job in trainings]}))


def test_a_speed_is_that_of_one_machine():
    dense, mine = (training_row(replace(TINY, codec=codec), 0.5, seconds=[2.0] * 99) for codec in (DENSE, "int8"))
    (_, summary) = summarize([dense | {"environment": {"torch": "a"}}, mine | {"environment": {"torch": "a"}}])
    assert summary["speedup"] == 1.0
    (_, summary) = summarize([dense | {"environment": {"torch": "a"}}, mine | {"environment": {"torch": "b"}}])
    assert summary["speedup"] is None


def test_the_docs_have_the_table_of_the_committed_results():
    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks" / "results" / "quality.json").read_text())
    assert result["summary"] == json.loads(json.dumps(summarize(result["rows"])))
    shown = (root / "docs" / "bench.md").read_text().partition("<!-- quality -->")[2].partition("<!-- /quality -->")[0]
    assert shown.strip() == table.markdown(result)
