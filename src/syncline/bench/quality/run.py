"""`bench quality`: train every task with every codec and seed, one after the other; a file keeps finished ones."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from syncline.bench.output import Countdown, environment, write_json
from syncline.bench.quality import lockstep, on_ranks
from syncline.bench.quality.rows import compared_loss, summarize
from syncline.bench.quality.tasks import Job
from syncline.errors import UsageError
from syncline.files import reason
from syncline.results.file import strict

Progress = Callable[[str], None]
_SAME_FOR_A_TASK = ("model", "data", "batch", "steps", "workers", "device", "pretrain", "pretrain_steps")
"""Values that all rows of a task share: rows with others cannot be compared."""


def measure(jobs: Sequence[Job], file: Path, *, progress: Progress = print) -> dict[str, Any]:
    """Run the jobs that the file does not have yet, and write it after each; returns its content."""
    rows = finished(file)
    for job in jobs:
        _check(job, rows, file)
    have = [{key: row[key] for key in asdict(jobs[0])} for row in rows] if jobs else []
    missing = [job for job in jobs if asdict(job) not in have]
    if len(missing) < len(jobs):
        progress(f"{len(jobs) - len(missing)} of {len(jobs)} trainings are in {file} already")
    steps = Countdown(sum(job.steps for job in missing), progress)
    result = _result(rows)
    for number, job in enumerate(missing, 1):
        place = f"{job.task}, {job.codec}, seed {job.seed} ({number} of {len(missing)})"

        def step_done(step: int, place: str = place, last: int = job.steps) -> None:
            steps.part_done(f"{place}: step {step} of {last}")

        made = (on_ranks if job.network else lockstep).train(job, step_done)
        accuracy = "" if made["accuracy"] is None else f"accuracy {made['accuracy']:.1%}, "
        progress(f"{place}: {accuracy}loss {compared_loss(made):.4f}")
        rows.append(made | {"environment": environment(torch.device(job.device))})
        result = _result(rows)
        write_json(strict(result), file)
    return result


def finished(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of an earlier run; none if there is no file."""
    if not file.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        summarize(rows)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{file} is not a file of bench quality ({reason(error)}): use another --out") from None
    return rows


def _check(job: Job, rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Rows of the same task must have the same setting."""
    wanted = asdict(job)
    for row in rows:
        if row["task"] != job.task:
            continue
        keys = (*_SAME_FOR_A_TASK, "optimizer") if row["codec"] == job.codec else _SAME_FOR_A_TASK
        for key in (key for key in keys if row[key] != wanted[key]):
            raise UsageError(
                f"{file} has rows of the task {job.task} with {key} {row[key]}, not {wanted[key]}: use another --out"
            )


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    device = torch.device(rows[-1]["device"] if rows else "cpu")
    return {"environment": environment(device), "summary": summarize(rows), "rows": rows}
