"""Checkpoints and step logs whose inside is wrong: they are damaged, an older checkpoint is used, and it says why."""

import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoint_content import content as make_content

from special_files import put
from syncline.errors import UsageError
from syncline.train.checkpoint import files
from syncline.train.checkpoint.resume import choose
from syncline.train.config import Config
from syncline.train.session.output import _crashed_row

CONFIG = Config().override({"compare.strategies": ["mine"], "train.epochs": 4})
MISSING = object()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run folder with the checkpoints of steps 4 and 7, each of two ranks."""
    run = tmp_path_factory.mktemp("made") / "run"
    tensors = {"w": torch.ones(2, 3)}
    group = {"params": [0], "lr": 0.1}
    for step in (4, 7):
        for rank in range(2):
            own = {"buffers": [{}], "synchronisers": [tensors], "rank": rank, "workers": 2}
            zero = {"parameters": [tensors], "optimizers": [{"state": {0: tensors}, "param_groups": [group]}]}
            folder = run / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(make_content(step, **own, **zero), folder / f"rank{rank}.pt")
    logs = run / "runs" / "mine"
    logs.mkdir(parents=True)
    for rank in range(2):
        rows = "".join(f'{{"step": {step}, "loss": 1.5, "step_ms": 2.0}}\n' for step in range(7))
        (logs / f"rank{rank}.steps.jsonl").write_text(rows)
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def _set(content, path, value):
    *way, last = path
    for key in way:
        content = content[key]
    if value is MISSING:
        del content[last]
    else:
        content[last] = value


def _change(run, path, value, *, rank=0, step=7):
    part = run / "checkpoints" / f"step-{step:08d}" / f"rank{rank}.pt"
    content = torch.load(part, weights_only=True)
    _set(content, path, value)
    torch.save(content, part)


def _assert_older(run, why):
    found = choose(run, CONFIG, workers=2)
    assert found.step == 4
    assert f"checkpoint step-00000007 is damaged ({why}): an older one is used" in found.warnings


def test_the_undamaged_run_is_taken_up_at_its_newest_checkpoint(run):
    found = choose(run, CONFIG, workers=2)
    assert (found.step, len(found.warnings)) == (7, 1)


HELD = "is not what a checkpoint holds"


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("history",), MISSING, "'history' is missing"),
        (("history",), "junk", f"'history' {HELD}"),
        (("history", "losses"), MISSING, f"'history' {HELD}"),
        (("history", "losses"), [1.0] * 7, f"'history' {HELD}"),
        (("history", "losses"), torch.zeros(7, 2, dtype=torch.float64), f"'history' {HELD}"),
        (("history", "losses"), torch.zeros(6, dtype=torch.float64), "'history' does not have 7 steps"),
        (("history", "step_ms"), torch.zeros(7), f"'history' {HELD}"),
        (("history", "epochs"), [{"epoch": "one"}], f"'history' {HELD}"),
        (("history", "resumed_at"), ["x"], f"'history' {HELD}"),
        (("history", "resumed_at"), [99], "'history' resumes after its last step"),
        (("history", "accuracy"), "good", f"'history' {HELD}"),
        (("steps",), 0, f"'steps' {HELD}"),
        (("steps",), "5", f"'steps' {HELD}"),
        (("steps",), float("nan"), f"'steps' {HELD}"),
        (("workers",), 10**400, f"'workers' {HELD}"),
        (("workers",), -1, f"'workers' {HELD}"),
        (("strategy",), None, f"'strategy' {HELD}"),
        (("train",), [], f"'train' {HELD}"),
        (("train", "model"), 3, f"'train' {HELD}"),
        (("train", "seed"), MISSING, f"'train' {HELD}"),
        (("random",), {}, f"'random' {HELD}"),
        (("random", "torch"), torch.zeros(3), f"'random' {HELD}"),
        (("buffers",), {}, f"'buffers' {HELD}"),
        (("synchronisers",), [], "'buffers' and 'synchronisers' have different lengths"),
        (("synchronisers",), [{"w": 3}], f"'synchronisers' {HELD}"),
        (("parameters",), MISSING, "'parameters' is missing"),
        (("parameters",), [{"w": torch.ones(2).to_sparse()}], f"'parameters' {HELD}"),
        (("optimizers",), [{"state": []}], f"'optimizers' {HELD}"),
    ],
)
def test_a_wrong_field_is_damage(path, value, why, run):
    _change(run, path, value)
    _assert_older(run, f"in rank0.pt, {why}")


def test_other_damage(run):
    _change(run, ("step",), float("nan"))
    _assert_older(run, "rank0.pt is of step nan, rank 0")
    _change(run, ("step",), 7)
    _change(run, ("more",), "keys are no harm")
    assert choose(run, CONFIG, workers=2).step == 7
    _change(run, ("strategy",), "other", rank=1)
    _assert_older(run, "rank1.pt is not of the same run as rank0.pt")
    _change(run, ("format",), "x" * 10_000)
    text = choose(run, CONFIG, workers=2).warnings[0]
    assert "written by another version" in text
    assert len(text) < 300
    torch.save([1, 2], run / "checkpoints" / "step-00000007" / "rank0.pt")
    _assert_older(run, "rank0.pt is truncated or not a checkpoint")
    torch.save(SimpleNamespace(), run / "checkpoints" / "step-00000007" / "rank0.pt")
    _assert_older(run, "rank0.pt is truncated or not a checkpoint")


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device", "socket"])
def test_something_else_in_the_place_of_a_file(kind, run, monkeypatch):
    """A pipe that nobody writes to would block for ever."""
    monkeypatch.chdir(run)
    part, log = run / "checkpoints" / "step-00000007" / "rank1.pt", run / "runs" / "mine" / "rank0.steps.jsonl"
    for path in (part, log):
        path.unlink()
        put(kind, path)
    found = choose(run, CONFIG, workers=2)
    assert found.step == 4
    assert "checkpoint step-00000007 is damaged (rank1.pt cannot be read: " in found.warnings[0]
    assert "runs/mine/rank0.steps.jsonl is damaged" in found.warnings[1]
    assert found.warnings[1].endswith("it is set aside")
    files.cut_logs(log.parent, rank=0, workers=2, after=4)
    assert not log.exists()
    assert os.path.lexists(f"{log}.aside")


def test_lines_of_a_log_that_are_not_steps_are_left_out_and_counted(run):
    log = run / "runs" / "mine" / "rank0.steps.jsonl"
    junk = ["", "junk", "[]", '{"step": "one"}', '{"step": 3}', "[" * 100_000, '{"step": 1' + "0" * 5000 + "}", '{"st']
    log.write_text(log.read_text() + "\n".join(junk))
    assert "runs/mine/rank0.steps.jsonl is damaged: 6 of its lines are not steps and are left out" in (
        choose(run, CONFIG, workers=2).warnings
    )
    spec, failure = SimpleNamespace(strategy="mine", workers=2, servers=0, train=CONFIG.train), SimpleNamespace(rank=0)
    assert _crashed_row(spec, failure, log.parent)["loss"] == [1.5] * 7
    files.cut_logs(log.parent, rank=0, workers=2, after=4)
    assert [row["step"] for row in files.read_steps(log)[0]] == [0, 1, 2, 3]


def test_all_damaged(run):
    for step in (4, 7):
        _change(run, ("history",), MISSING, step=step)
    with pytest.raises(UsageError, match=r"step-00000004 .*'history' is missing.* and so are all newer ones"):
        choose(run, CONFIG, workers=2)


JUNK = (MISSING, None, True, -1, 10**30, 0.5, float("nan"), float("inf"), "", "x" * 5000, [], {}, [[]], {"a": {}})


def _mutations(seed, count):
    chooser = random.Random(seed)
    tensors = [torch.zeros(0), torch.zeros(3, 3), torch.ones(7).to_sparse(), torch.zeros(7, dtype=torch.int8)]
    return [(chooser.randrange(2**30), chooser.choice([*JUNK, *tensors])) for _ in range(count)]


def _paths(content, prefix=()):
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*prefix, key)
        if isinstance(value, dict | list) and value:
            yield from _paths(value, (*prefix, key))


def test_random_changes_never_end_in_anything_but_damage(run):
    part = run / "checkpoints" / "step-00000007" / "rank0.pt"
    whole = part.read_bytes()
    for number, value in _mutations(14, 150):
        content = torch.load(part, weights_only=True)
        paths = sorted(_paths(content), key=str)
        _set(content, paths[number % len(paths)], value)
        torch.save(content, part)
        assert choose(run, CONFIG, workers=2).step in (4, 7)
        part.write_bytes(whole)
    chooser = random.Random(14)
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(chooser.choice((1, 3, 30))):
            content[chooser.randrange(len(content))] = chooser.randrange(256)
        part.write_bytes(content[: chooser.choice((len(content), chooser.randrange(len(content))))])
        assert choose(run, CONFIG, workers=2).step in (4, 7)
