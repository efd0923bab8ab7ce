"""Checkpoints under the real command line: a run that was killed and resumed ends bit-equal to one that was not."""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch
from command import results
from forked import Forked, call, launched

from syncline.cli.main import main
from syncline.results.file import load

SGD, ADAMW = "sgd(lr=0.05, momentum=0.9)", "adamw(lr=0.01)"

# (strategy, workers, optimizer): a new strategy adds a line
CASES = [
    pytest.param("ddp", 3, ADAMW, marks=pytest.mark.full),
    pytest.param("server", 2, ADAMW, marks=pytest.mark.full),
    pytest.param("resumable:ErrorFeedback", 2, SGD, marks=pytest.mark.full),  # `finished` is one, and is resumed
    pytest.param("syncline", 3, ADAMW, marks=pytest.mark.full),  # the next one has codec state as well
    ("syncline(powersgd(rank=2))", 2, SGD),
    pytest.param("syncline(dgc(0.05))", 2, "sgd(lr=0.05)", marks=pytest.mark.full),
    pytest.param("ring-dgc(ratio=0.2, warmup=6)", 2, SGD, marks=pytest.mark.full),
]

STEPS, EPOCHS, EVERY = 7, 2, 4
KILLED_AFTER = (5, 6, 9, 10)  # rows: always some past the newest checkpoint
MODEL = ("--model", "resumable:net", "--batch", "12", "--steps", STEPS, "--set", "train.test_samples=12")
MODEL += ("--set", "train.threads=1", "--checkpoint-every", EVERY)


def _arguments(strategy, workers, optimizer):
    where = () if strategy == "single" else ("--nproc", workers)
    return (
        "train",
        "--strategy",
        strategy,
        *where,
        *MODEL,
        "--epochs",
        EPOCHS,
        "--set",
        f"train.optimizer={optimizer}",
    )


def _rows(folder, rank=0):
    (log,) = folder.glob(f"runs/*/rank{rank}.steps.jsonl")
    return [json.loads(line)["step"] for line in log.read_text().splitlines() if line.endswith("}")]


def _kill_after(command, folder, rows, timeout=60):
    """SIGKILL for the command and all its ranks, once rank 0 has logged so many steps."""
    deadline = time.monotonic() + timeout
    while not list(folder.glob("runs/*/rank0.steps.jsonl")) or len(_rows(folder)) < rows:
        assert command.running(), command.finish().err
        assert time.monotonic() < deadline
        time.sleep(0.005)
    command.process.kill()
    for pid, _ in command._alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.finish()
    assert command.code == -signal.SIGKILL
    assert command.left() == []


def _names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def _newest(folder):
    return max(int(name[5:]) for name in _names(folder) if name[5:].isdigit())


def _state(folder, step):
    """Everything in a checkpoint that must not depend on how often the run was interrupted."""
    parts = [torch.load(path, weights_only=True) for path in _files(folder, step)]
    for part in parts:
        part["history"] = {"losses": part["history"]["losses"], "accuracy": part["history"]["accuracy"]}
    return parts


def _files(folder, step):
    return sorted((folder / "checkpoints" / f"step-{step:08d}").iterdir())


def _assert_equal(a, b, where="checkpoint"):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            _assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            _assert_equal(*pair, f"{where}[{i}]")
    else:
        assert a == b, where


def _apart(tmp_path):
    """Another folder to run in: what is to be killed must not be mistaken."""
    (tmp_path / "apart").mkdir()
    return tmp_path / "apart"


def _check_resumed(tmp_path, workers, *, lost_after, resumed_at):
    """`cut` was resumed: it is `whole` again, and says what was done."""
    _assert_equal(_state(tmp_path / "cut", STEPS * EPOCHS), _state(tmp_path / "whole", STEPS * EPOCHS))
    (whole,), (cut,) = (results(tmp_path / name)["runs"] for name in ("whole", "cut"))
    assert cut["status"] == "ok", f"killed after {lost_after} steps"
    assert cut["loss"] == whole["loss"]
    assert cut["test_accuracy"] == whole["test_accuracy"]
    assert [e["loss"] for e in cut["epochs"]] == [e["loss"] for e in whole["epochs"]]
    assert len(cut["step_ms_series"]) == STEPS * EPOCHS
    assert cut["step_ms"]["n"] == STEPS * EPOCHS - 2, "both first steps are left out"
    for rank in range(workers):
        assert _rows(tmp_path / "cut", rank) == list(range(STEPS * EPOCHS))
    assert any(f"resumed at step {resumed_at} of" in text for text in load(tmp_path / "cut")["warnings"])


@pytest.mark.parametrize(
    ("strategy", "workers", "optimizer"), CASES, ids=[getattr(case, "values", case)[0] for case in CASES]
)
def test_killed_and_resumed_is_bit_equal_to_uninterrupted(strategy, workers, optimizer, tmp_path):
    arguments, rows = _arguments(strategy, workers, optimizer), random.choice(KILLED_AFTER)
    killed = Forked(*arguments, "--out", "../cut", cwd=_apart(tmp_path), SYNCLINE_TEST_SLEEP="0.15")
    whole = Forked(*arguments, "--out", "whole", cwd=tmp_path)
    _kill_after(killed, tmp_path / "cut", rows)
    assert whole.finish().code == 0, whole.err
    done, step = len(_rows(tmp_path / "cut")), _newest(tmp_path / "cut")
    assert rows <= done < STEPS * EPOCHS, "killed midway"
    assert step < done, "steps were lost"
    assert results(tmp_path / "cut")["runs"] == []
    resumed = call("train", "--trust", "--resume", "cut", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    _check_resumed(tmp_path, workers, lost_after=done, resumed_at=step)
    assert _names(tmp_path / "cut") == ["step-00000012", "step-00000014"], "the newest two are kept"


def test_ranks_of_a_launcher_are_killed_and_resumed(tmp_path):
    arguments = _arguments("all-reduce", 2, SGD)
    whole = Forked(*arguments, "--out", "whole", cwd=tmp_path)
    place = arguments.index("--nproc")  # the launcher's business
    ranks = (*arguments[:place], *arguments[place + 2 :], "--out", "../cut")
    killed = launched(*ranks, ranks=2, cwd=_apart(tmp_path), SYNCLINE_TEST_SLEEP="0.15")
    _kill_after(killed[0], tmp_path / "cut", 6)
    killed[1].finish()
    assert whole.finish().code == 0, whole.err
    done, step = len(_rows(tmp_path / "cut")), _newest(tmp_path / "cut")
    assert step < done < STEPS * EPOCHS
    for resumed in launched("train", "--trust", "--resume", "cut", ranks=2, cwd=tmp_path):
        assert resumed.finish().code == 0, resumed.err
    assert resumed.left() == []
    _check_resumed(tmp_path, 2, lost_after=done, resumed_at=step)
    for again in launched("train", "--trust", "--resume", "cut", ranks=2, cwd=tmp_path):
        assert again.finish().code == 2
        assert "is finished: use --epochs 3" in again.err, "both ranks say so, and end"
    assert again.left() == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two ranks, with the checkpoints of steps 4 and 7."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = _arguments("resumable:ErrorFeedback", 2, SGD)
    done = call(*arguments, "--epochs", 1, "--out", "run", cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path):
    """The finished run again, to be mistreated."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    """Call the command line in this process: it must end before a rank is started."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capfd.readouterr().err.strip()

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("workers", [1, 3])
def test_another_world_size_goes_on_with_the_whole_curve(workers, copy, finished, tmp_path):
    where = ("--nproc", workers) if workers > 1 else ("--strategy", "single")
    done = call("train", "--trust", "--resume", "run", *where, "--epochs", 2, cwd=tmp_path)
    assert done.code == 0, done.err
    (before,), (entry,) = results(finished)["runs"], load(copy)["runs"]
    assert entry["world_size"] == workers
    assert entry["loss"][:STEPS] == pytest.approx(before["loss"], abs=1e-12)
    assert len(entry["loss"]) == len(entry["step_ms_series"]) == 2 * STEPS
    assert all(math.isfinite(loss) for loss in entry["loss"])
    assert [epoch["epoch"] for epoch in entry["epochs"]] == [1, 2]
    text = " ".join(results(copy)["warnings"])
    assert f"on 2 ranks, now {workers}" in text
    assert ("its error feedback, if any, is not kept" in text) == (workers == 1)
    assert len(_files(copy, 2 * STEPS)) == workers


def _truncate(folder):
    part = folder / "checkpoints" / "step-00000007" / "rank1.pt"
    part.write_bytes(part.read_bytes()[:-700])
    return "rank1.pt is truncated"


def _lose_a_file(folder):
    (folder / "checkpoints" / "step-00000007" / "rank1.pt").unlink()
    return "rank1.pt is missing"


def _kill_during_the_write(folder):
    whole = folder / "checkpoints" / "step-00000007"
    whole.rename(whole.with_name(f"{whole.name}.tmp"))
    (whole.with_name(f"{whole.name}.tmp") / "rank1.pt").write_bytes(b"half")
    return ""


def _change_a_shape(folder):
    part = folder / "checkpoints" / "step-00000007" / "rank0.pt"
    content = torch.load(part, weights_only=True)
    content["parameters"][0]["net.second.bias"] = torch.zeros(3)
    torch.save(content, part)
    return "it is not of this model: 'net.second.bias' is missing or has another shape"


def _put_pipes(folder):
    for path in (folder / "checkpoints" / "step-00000007" / "rank1.pt", *folder.glob("runs/*/rank0.steps.jsonl")):
        path.unlink()
        os.mkfifo(path)
    return "rank1.pt cannot be read: it is not a regular file"


# What else is damage is tested without ranks, in `train/test_damaged_runs.py`.
HARMS = [_truncate, _kill_during_the_write, _put_pipes]
HARMS += [pytest.param(harm, marks=pytest.mark.full) for harm in (_lose_a_file, _change_a_shape)]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(harm, copy, finished, tmp_path):
    problem = harm(copy)
    (copy / "results.json").unlink()
    done = call("train", "--trust", "--resume", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    _assert_equal(_state(copy, STEPS), _state(finished, STEPS))
    assert results(copy)["runs"][0]["loss"] == results(finished)["runs"][0]["loss"]
    text = " ".join(results(copy)["warnings"])
    assert "resumed at step 4 of 7" in text
    assert f"step-00000007 is damaged ({problem}" in text or not problem
    aside = ["step-00000007.aside"] if problem else []
    assert _names(copy) == ["step-00000004", "step-00000007", *aside], "nothing unfinished is left"


def test_a_run_killed_between_its_last_checkpoint_and_its_results_gets_its_results(copy, finished, tmp_path):
    (copy / "results.json").unlink()
    done = call("train", "--trust", "--resume", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    (before,), (entry,) = results(finished)["runs"], load(copy)["runs"]
    assert entry["loss"] == before["loss"]
    assert entry["test_accuracy"] == before["test_accuracy"]
    assert (copy / "report.html").exists()


def test_an_older_checkpoint_by_name_cuts_what_came_after(copy, finished, tmp_path):
    done = call("train", "--trust", "--resume", "run/checkpoints/step-00000004", cwd=tmp_path)
    assert done.code == 0, done.err
    _assert_equal(_state(copy, STEPS), _state(finished, STEPS))
    assert _rows(copy, 1) == list(range(STEPS))
    assert "step-00000007.aside" in _names(copy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "is finished: use --epochs 2"),
        (("--model", "mlp"), "train.model = 'resumable:net' and cannot resume with 'mlp'"),
        (("--data", "cifar10"), "train.data"),
        (("--seed", 3, "--epochs", 2), "train.seed = 0 and cannot resume with 3"),
        (("--batch", 24), "train.batch"),
        (("--steps", 9), "use --epochs to train longer"),
        (("--set", f"train.optimizer={ADAMW}"), "train.optimizer"),
        (("--strategy", "ddp-powersgd", "--epochs", 2), "syncline(powersgd(rank=4))"),
        (("--out", "other"), "leave --out out"),
        (("--recipe", "demo"), "leave --recipe out"),
        (("--checkpoint-every", 0), "--checkpoint-every must be at least 1, not 0"),
        (("--nproc", 5, "--epochs", 2), "use --batch 10"),
        (("--set", "train.epochs=0"), "--epochs must be 1 or more"),
    ],
)
def test_wrong_options_are_one_line_and_change_nothing(options, message, copy, invoke):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    code, err = invoke("train", "--trust", "--resume", "run", *options)
    assert code == 2, err
    assert message in err
    assert len(err.splitlines()) == 1, err
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_an_error_that_only_a_rank_can_see_leaves_the_run_as_it_was(copy, tmp_path):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.suffix != ".log"}
    done = call("train", "--trust", "--resume", "run", "--epochs", 2, "--set", "train.device=tpu", cwd=tmp_path)
    assert done.code == 2
    assert "unknown device 'tpu'" in done.err
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.suffix != ".log"}


def test_no_checkpoint_there(copy, invoke, tmp_path):
    for path in (copy / "checkpoints").iterdir():
        for part in path.iterdir():
            part.write_bytes(part.read_bytes()[:100])
    code, err = invoke("train", "--trust", "--resume", "run")
    assert (code, "step-00000004" in err, "and so are all newer ones" in err) == (2, True, True), err
    shutil.rmtree(copy / "checkpoints")
    code, err = invoke("train", "--trust", "--resume", "run")
    assert (code, "there is no checkpoint in" in err) == (2, True), err
    code, err = invoke("train", "--trust", "--resume", tmp_path)
    assert (code, "is not a run folder" in err) == (2, True), err
    (copy / "config.json").write_text("{")
    code, err = invoke("train", "--trust", "--resume", "run")
    assert (code, "it is not JSON" in err) == (2, True), err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("train", "--strategy", "ddp-powersgd(rank=2)", "--checkpoint-every", 5), "syncline(powersgd(rank=4))"),
        (("train", "--checkpoint-every", -1), "must be at least 1, not -1"),
        (("train", "--set", "train.checkpoint_every=-1"), "--checkpoint-every must be 0 or more"),
        (("compare", "--set", "train.checkpoint_every=5"), "a checkpoint holds one run"),
    ],
)
def test_checkpoints_that_cannot_be_written(options, message, invoke, tmp_path):
    code, err = invoke(*options, *([] if "-1" in map(str, options) else MODEL[:4]))
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_rank_killed_in_a_reshape_is_named_and_the_run_goes_on_from_the_checkpoint_before_it(tmp_path):
    data = "shapes(classes='5-9', train=32, test=16, image_size=8)"
    args = ["train", "--strategy", "syncline", "--nproc", 2, "--model", "faulty:killed_in_a_reshape", "--data", data]
    args += ["--batch", 8, "--steps", 4, "--epochs", 3, "--freeze", "schedule(alpha=0.5, guard=0)", "--pipe", 2, "--dp"]
    args += ["--set", "train.test_samples=16", "--set", "train.threads=1", "--checkpoint-every", 3]
    done = call(*args, "--out", "run", cwd=tmp_path)
    assert (tmp_path / "fired").exists(), "the fault happened"
    assert done.code == 1
    (crash,) = results(tmp_path / "run")["runs"]
    assert crash["error"]["rank"] == 1
    assert "SIGKILL" in crash["error"]["summary"]
    assert _names(tmp_path / "run") == ["step-00000003", "step-00000004"], "one was due, one is from before the reshape"
    done = call("train", "--resume", "run", "--trust", cwd=tmp_path)
    assert done.code == 0, done.err
    (resumed,) = results(tmp_path / "run")["runs"]
    assert resumed["loss"][:4] == crash["loss"][:4]
    assert [epoch["frozen"] for epoch in resumed["epochs"]] == [2, 3, 4]
    assert {change["kind"] for change in resumed["restructurings"]} == {"freeze", "reshape"}
