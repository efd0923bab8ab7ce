"""Checkpoint files: `checkpoints/step-00000040/rank0.pt`, `rank1.pt` ..., written atomically.

Every rank writes its file into `step-00000040.tmp`; after a barrier, rank 0 renames the folder. A process that is
killed at any moment leaves the old checkpoint or the new one.
"""

import errno
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syncline.errors import short
from syncline.files import open_regular, parse_json, read_text, reason, write_text, writing
from syncline.train.checkpoint.content import FORMAT, find_mistake

KEPT = 2
"""Checkpoints that are kept; older ones are deleted."""
_NAME = re.compile(r"step-(\d{8,})")
_LOG = re.compile(r"rank(\d+)\.steps\.jsonl")
_UNFINISHED = ".tmp"
_ASIDE = ".aside"
_VISIBLE_WITHIN_S = 30.0


def write(folder: Path, content: dict[str, Any], *, rank: int, workers: int, barrier: Callable[[], None]) -> Path:
    """Write this rank's part of the checkpoint of `content["step"]`, and return its path; `barrier` waits for all."""
    final = folder / f"step-{content['step']:08d}"
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir(parents=True, exist_ok=True)
    part = unfinished / f"rank{rank}.pt"
    with writing(part), part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    barrier()
    if rank == 0:
        _wait_for_files([unfinished / f"rank{r}.pt" for r in range(workers)])
        _fsync(unfinished)
        unfinished.rename(final)
        _fsync(folder)
        for old in list_checkpoints(folder)[KEPT:]:
            # Renamed first, so that a half-deleted folder is not mistaken for a checkpoint.
            shutil.rmtree(old.rename(old.with_name(old.name + _UNFINISHED)))
    return final


def read(path: Path, rank: int, *, mapped: bool = False) -> dict[str, Any]:
    """A rank's part; `mapped` leaves the tensors on disk, for reading the other fields."""
    content: dict[str, Any] = torch.load(path / f"rank{rank}.pt", map_location="cpu", weights_only=True, mmap=mapped)
    return content


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def find_damage(path: Path) -> str | None:
    """A description of the damage to a checkpoint; None if all ranks' files exist and are unchanged."""
    try:
        workers, rank, first = 1, 0, None
        while rank < workers:
            with open_regular(path / f"rank{rank}.pt") as file, zipfile.ZipFile(file) as archive:
                # torch compresses nothing; what is compressed could have any size.
                if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                    return f"rank{rank}.pt is truncated or not a checkpoint"
                broken = archive.testzip()
            if broken is not None:
                return f"rank{rank}.pt has changed since it was written"
            content = read(path, rank, mapped=True)
            if content["format"] != FORMAT:
                return f"rank{rank}.pt was written by another version of Syncline (format {short(content['format'])})"
            if content["step"] != step_of(path) or content["rank"] != rank:
                return f"rank{rank}.pt is of step {short(content['step'])}, rank {short(content['rank'])}"
            if mistake := find_mistake(content):
                return f"in rank{rank}.pt, {mistake}"
            common = {key: content[key] for key in ("workers", "steps", "strategy", "train")}
            if rank and common != first:
                return f"rank{rank}.pt is not of the same run as rank0.pt"
            first, workers, rank = common, content["workers"], rank + 1
    except FileNotFoundError:
        return f"rank{rank}.pt is missing"
    except OSError as error:
        return f"rank{rank}.pt cannot be read: {reason(error)}"
    except Exception:  # whatever the readers of zip files and tensors say to bytes that are not theirs
        return f"rank{rank}.pt is truncated or not a checkpoint"
    return None


def remove_unfinished(folder: Path) -> None:
    """Delete checkpoints that were not written to the end; on a full disk, others need their space."""
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path)


def remove_later(folder: Path, *, than: int) -> None:
    """Before resuming from step `than`: delete unfinished checkpoints and set later ones aside."""
    remove_unfinished(folder)
    for path in list_checkpoints(folder):
        if step_of(path) > than:
            aside = path.with_name(path.name + _ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def cut_logs(folder: Path, *, rank: int, workers: int, after: int) -> None:
    """Remove the rows from step `after` on from the rank's step log; rank 0 also from those of ranks that are gone."""
    for log in step_logs(folder):
        number = _rank_of(log)
        if number == rank or (rank == 0 and number >= workers):
            try:
                rows, _ = read_steps(log)
            except (OSError, ValueError):
                log.rename(log.with_name(log.name + _ASIDE))
            else:
                write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["step"] < after), log)


def step_logs(folder: Path) -> list[Path]:
    """The ranks' step logs in a strategy's folder."""
    return sorted((log for log in folder.glob("rank*.steps.jsonl") if _LOG.fullmatch(log.name)), key=_rank_of)


def read_steps(log: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a step log, and the number of lines that are not rows; the last line may be incomplete.

    `OSError` or `ValueError` if it is not a file of text. A link is not followed: its rows would be written elsewhere.
    """
    if log.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(log))
    lines = read_text(log).split("\n")
    if lines[-1] and not lines[-1].endswith("}"):  # the process was killed while it wrote
        del lines[-1]
    rows = [row for line in lines if (row := _row(line)) is not None]
    return rows, sum(1 for line in lines if line) - len(rows)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    good = (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and isinstance(row.get("step_ms"), int | float)
        and isinstance(row.get("loss"), int | float | None)
    )
    return row if good else None


def _rank_of(log: Path) -> int:
    match = _LOG.fullmatch(log.name)
    assert match is not None
    return int(match[1])


def _wait_for_files(files: list[Path]) -> None:
    """All ranks have written. On a file system shared by machines, files may take a moment to appear."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while missing := [file for file in files if not file.exists()]:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{missing[0]} was written by its rank but rank 0 cannot see it: with ranks on several machines, use"
                " an --out on a file system that they share"
            )
        time.sleep(0.1)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
