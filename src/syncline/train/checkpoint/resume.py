"""The choice of the checkpoint to resume from, and checks that the run can be resumed, before any rank starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import real_path, reason
from syncline.results import file as results_file
from syncline.train.checkpoint import files
from syncline.train.config import CHECKPOINTS, FIXED_SETTINGS, Config, Train, run_of
from syncline.train.strategies import load


@dataclass(frozen=True)
class Resume:
    """An undamaged checkpoint, and the warnings that the results must have if the run resumes from it."""

    checkpoint: Path
    step: int
    warnings: tuple[str, ...]


def choose(path: Path, config: Config, *, workers: int, damaged: Mapping[Path, str] | None = None) -> Resume:
    """The newest undamaged checkpoint of the run folder `path`, or the checkpoint `path` itself.

    `damaged` are checkpoints that ranks could not load, and why.
    """
    run = run_of(path)
    newest, warnings = _undamaged(path, run, damaged or {})
    warnings += _log_warnings(run)
    head = files.read(newest, 0, mapped=True)
    _check_settings(config, head, run)
    step, total = head["step"], config.train.epochs * head["steps"]
    if step > total:
        raise UsageError(
            f"{newest.name} is after the last step, {total}: use --epochs {-(-step // head['steps'])} or more"
        )
    if step == total and _is_complete(run, total):
        raise UsageError(f"{run} is finished: use --epochs {config.train.epochs + 1} to train longer")
    resumed = [*head["history"]["resumed_at"], step]
    at = f"step{'s' * (len(resumed) > 1)} {', '.join(map(str, resumed))}"
    warnings.append(
        f"resumed at {at} of {total}: start-up, shares, wire bytes and trace cover only the steps since then"
    )
    (strategy,) = config.compare.strategies
    if strategy != head["strategy"]:
        warnings.append(f"the steps before {step} used {head['strategy']}; its error feedback, if any, is not kept")
    if workers != head["workers"]:
        warnings.append(
            f"the steps before {step} ran on {head['workers']} ranks, now {workers}: their losses are the mean over the"
            " ranks, random generators are seeded again, and residuals are the mean of the old ranks'"
        )
    pipe = head["train"].get("pipe", config.train.pipe)
    if pipe != config.train.pipe:
        warnings.append(
            f"the steps before {step} used --pipe {pipe}; the stages are now those of --pipe {config.train.pipe}"
        )
    return Resume(newest, step, tuple(warnings))


def check_resumable(config: Config, *, resumed: bool) -> None:
    """Refuse checkpoints of several runs at once, and of a strategy whose state they cannot hold."""
    if not config.train.checkpoint_every and not resumed:
        return
    option = "--resume" if resumed else "--checkpoint-every"
    if len(config.compare.strategies) != 1 or len(config.compare.scale) > 1:
        raise UsageError(f"a checkpoint holds one run: use train with {option}, one strategy and one world size")
    (strategy,) = config.compare.strategies
    if not load(strategy).resumable:
        raise UsageError(
            f"'{strategy}' has state that a checkpoint cannot hold: leave {option} out, or use"
            " 'syncline(powersgd(rank=4))'"
        )


def _undamaged(path: Path, run: Path, damaged: Mapping[Path, str]) -> tuple[Path, list[str]]:
    warnings: list[str] = []
    candidates = files.list_checkpoints(run / CHECKPOINTS) if real_path(path) == run else [real_path(path)]
    if not candidates:
        raise UsageError(f"there is no checkpoint in {run}: only runs with --checkpoint-every N write them")
    for candidate in candidates:
        problem = damaged.get(candidate) or files.find_damage(candidate)
        if problem is None:
            return candidate, warnings
        warnings.append(f"checkpoint {candidate.name} is damaged ({problem}): an older one is used")
    also = ", and so are all newer ones" if len(candidates) > 1 else ""
    raise UsageError(f"checkpoint {candidate.name} in {run} is damaged ({problem}){also}: start again without --resume")


def _log_warnings(run: Path) -> list[str]:
    """One sentence for each step log that has lines which are not rows; they are left out."""
    warnings = []
    for log in (log for folder in sorted(run.glob("runs/*/")) for log in files.step_logs(folder)):
        try:
            _, odd = files.read_steps(log)
        except (OSError, ValueError) as error:
            warnings.append(f"{log.relative_to(run)} is damaged ({reason(error)}): it is set aside")
        else:
            if odd:
                warnings.append(f"{log.relative_to(run)} is damaged: {odd} of its lines are not steps and are left out")
    return warnings


def _check_settings(config: Config, head: dict[str, Any], run: Path) -> None:
    for key in FIXED_SETTINGS:
        asked = getattr(config.train, key)
        was = head["train"].get(key, getattr(Train(), key))
        same = (was, head["steps"]) if key == "steps" else (was,)
        if asked not in same:
            hint = "use --epochs to train longer" if key == "steps" else "leave it out, or start a new run"
            raise UsageError(f"{run} was started with train.{key} = {was!r} and cannot resume with {asked!r}: {hint}")


def _is_complete(run: Path, total: int) -> bool:
    """Whether the run's results already have all steps."""
    try:
        results = results_file.load(run)
    except UsageError:
        return False
    return any(results_file.ok(entry) and len(entry["loss"]) >= total for entry in results["runs"])
