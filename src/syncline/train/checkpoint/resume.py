"""Which checkpoint a run goes on from, and whether it may: decided once, before any rank starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.results import file as results_file
from syncline.train.checkpoint import files as checkpoint
from syncline.train.config import CHECKPOINTS, Config, run_of
from syncline.train.strategies import load

FIXED = ("model", "data", "seed", "batch", "optimizer", "steps")
"""Settings that make a run what it is: with another value it would be another run."""


@dataclass(frozen=True)
class Resume:
    """A checkpoint that was found whole, and what the results must say about going on from it."""

    run: Path
    checkpoint: Path
    step: int
    warnings: tuple[str, ...]


def choose(path: Path, config: Config, *, workers: int) -> Resume:
    """The newest whole checkpoint of a run folder, or the one that `path` is; `config` is what shall go on."""
    run = run_of(path)
    newest, warnings = _whole(path, run)
    head = checkpoint.read(newest, 0, mapped=True)
    _check(config, head, run)
    step, total = head["step"], config.train.epochs * head["steps"]
    if step > total:
        raise UsageError(
            f"{newest.name} is past the end, step {total}: use --epochs {-(-step // head['steps'])} or more"
        )
    if step == total and _reported(run, total):
        raise UsageError(f"{run} is finished: use --epochs {config.train.epochs + 1} to train on")
    resumed = [*head["history"]["resumed_at"], step]
    places = f"step{'s' * (len(resumed) > 1)} {', '.join(map(str, resumed))}"
    warnings.append(f"resumed at {places} of {total}: start-up, shares, wire bytes and trace are of the steps since")
    (strategy,) = config.compare.strategies
    if strategy != head["strategy"]:
        warnings.append(
            f"the steps before {step} were under {head['strategy']}; its error feedback, if any, is not carried over"
        )
    if workers != head["workers"]:
        warnings.append(
            f"the steps before {step} were on {head['workers']} ranks, now on {workers}: their losses are the mean over"
            " the ranks, random numbers are drawn anew, and residuals are the mean of the old ranks'"
        )
    return Resume(run, newest, step, tuple(warnings))


def check_resumable(config: Config, *, resumed: bool) -> None:
    """Refuse checkpoints with a strategy whose state they cannot hold, and of several runs at once."""
    if not config.train.checkpoint_every and not resumed:
        return
    option = "--resume" if resumed else "--checkpoint-every"
    if len(config.compare.strategies) != 1 or len(config.compare.scale) > 1:
        raise UsageError(f"checkpoints are of one run: use train with {option}, one strategy and one world size")
    (strategy,) = config.compare.strategies
    if not load(strategy).resumable:
        raise UsageError(
            f"'{strategy}' keeps state that no checkpoint can hold: leave {option} out, or use"
            " 'syncline(powersgd(rank=4))'"
        )


def _whole(path: Path, run: Path) -> tuple[Path, list[str]]:
    warnings: list[str] = []
    candidates = checkpoint.found(run / CHECKPOINTS) if path.resolve() == run else [path.resolve()]
    if not candidates:
        raise UsageError(f"there is no checkpoint in {run}: runs with --checkpoint-every N write them")
    for candidate in candidates:
        problem = checkpoint.damage(candidate)
        if problem is None:
            return candidate, warnings
        warnings.append(f"checkpoint {candidate.name} is damaged ({problem}): an older one was taken")
        if candidate == candidates[-1]:
            raise UsageError(
                f"checkpoint {candidate.name} in {run} is damaged ({problem})"
                f"{', as are all newer ones' if len(candidates) > 1 else ''}: start again without --resume"
            )
    raise AssertionError("the last candidate is taken or refused")


def _check(config: Config, head: dict[str, Any], run: Path) -> None:
    for key in FIXED:
        was, asked = head["train"][key], getattr(config.train, key)
        same = (was, head["steps"]) if key == "steps" else (was,)
        if asked not in same:
            hint = "use --epochs to train longer" if key == "steps" else "leave it out, or start a new run"
            raise UsageError(f"{run} was started with train.{key} = {was!r} and cannot go on with {asked!r}: {hint}")


def _reported(run: Path, total: int) -> bool:
    """Whether the results already describe the whole run."""
    try:
        results = results_file.load(run)
    except UsageError:
        return False
    return any(results_file.ok(entry) and len(entry["loss"]) >= total for entry in results["runs"])
