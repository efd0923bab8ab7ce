"""Checkpoint files: `checkpoints/step-00000040/rank0.pt`, `rank1.pt` ..., written atomically.

Every rank writes its file into `step-00000040.tmp`; after a barrier, rank 0 renames the folder. A process that is
killed at any moment leaves the old checkpoint or the new one.
"""

import json
import os
import pickle
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syncline.files import write_text

FORMAT = 1
KEPT = 2
"""Checkpoints that are kept; older ones are deleted."""
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".tmp"
_ASIDE = ".aside"
_VISIBLE_WITHIN_S = 30.0


def write(folder: Path, content: dict[str, Any], *, rank: int, workers: int, barrier: Callable[[], None]) -> None:
    """Write this rank's part of the checkpoint of `content["step"]`; `barrier` waits for all ranks."""
    final = folder / f"step-{content['step']:08d}"
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir(parents=True, exist_ok=True)
    with (unfinished / f"rank{rank}.pt").open("wb") as file:
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
        workers, rank = 1, 0
        while rank < workers:
            with zipfile.ZipFile(path / f"rank{rank}.pt") as archive:
                broken = archive.testzip()
            if broken is not None:
                return f"rank{rank}.pt has changed since it was written"
            content = read(path, rank, mapped=True)
            if content["format"] != FORMAT:
                return f"rank{rank}.pt was written by another version of Syncline (format {content['format']})"
            if content["step"] != step_of(path) or content["rank"] != rank:
                return f"rank{rank}.pt is of step {content['step']}, rank {content['rank']}"
            workers, rank = content["workers"], rank + 1
    except FileNotFoundError:
        return f"rank{rank}.pt is missing"
    except OSError as error:
        return f"rank{rank}.pt cannot be read: {error.strerror or error}"
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError):
        return f"rank{rank}.pt is truncated or not a checkpoint"
    return None


def remove_later(folder: Path, *, than: int) -> None:
    """Before resuming from step `than`: delete unfinished checkpoints and set later ones aside."""
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path)
    for path in list_checkpoints(folder):
        if step_of(path) > than:
            aside = path.with_name(path.name + _ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def cut_logs(folder: Path, *, rank: int, workers: int, after: int) -> None:
    """Remove the rows from step `after` on from the rank's step log; rank 0 also from those of ranks that are gone."""
    for log in folder.glob("rank*.steps.jsonl"):
        number = int(log.name.removeprefix("rank").partition(".")[0])
        if number == rank or (rank == 0 and number >= workers):
            # A process that was killed may have left an incomplete row.
            lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
            write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] < after), log)


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
