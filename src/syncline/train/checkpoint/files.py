"""Checkpoints on disk: `checkpoints/step-00000040/rank0.pt`, `rank1.pt` ..., whole or not there at all.

Every rank writes its file into `step-00000040.tmp`, all meet, and rank 0 gives the folder its name in one move. A
process that is killed at any moment leaves the old checkpoint or the new one.
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
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".tmp"
_ASIDE = ".aside"
_PATIENCE_S = 30.0
_POLL_S = 0.1


def write(folder: Path, content: dict[str, Any], *, rank: int, workers: int, meet: Callable[[], None]) -> None:
    """Write this rank's part of the checkpoint of `content["step"]`; `meet` returns when all ranks have called it."""
    final = folder / f"step-{content['step']:08d}"
    unfinished = final.with_name(final.name + _UNFINISHED)
    unfinished.mkdir(parents=True, exist_ok=True)
    with (unfinished / f"rank{rank}.pt").open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    meet()
    if rank == 0:
        _await([unfinished / f"rank{r}.pt" for r in range(workers)])
        _sync(unfinished)
        unfinished.rename(final)
        _sync(folder)
        for old in found(folder)[KEPT:]:
            _remove(old)


def read(path: Path, rank: int, *, mapped: bool = False) -> dict[str, Any]:
    """A rank's part; `mapped` leaves tensors on the disk, for a look at the rest."""
    content: dict[str, Any] = torch.load(path / f"rank{rank}.pt", map_location="cpu", weights_only=True, mmap=mapped)
    return content


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; unfinished ones are none."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: all ranks' files are there, every byte as it was written."""
    try:
        workers, rank = 1, 0
        while rank < workers:
            with zipfile.ZipFile(path / f"rank{rank}.pt") as archive:
                broken = archive.testzip()
            if broken is not None:
                return f"rank{rank}.pt has changed since it was written"
            content = read(path, rank, mapped=True)
            if content["format"] != FORMAT:
                return f"rank{rank}.pt is of another version of Syncline (format {content['format']})"
            if content["step"] != step_of(path) or content["rank"] != rank:
                return f"rank{rank}.pt is of step {content['step']}, rank {content['rank']}"
            workers, rank = content["workers"], rank + 1
    except FileNotFoundError:
        return f"rank{rank}.pt is missing"
    except OSError as error:
        return f"rank{rank}.pt cannot be read: {error.strerror or error}"
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError):
        return f"rank{rank}.pt is cut off or no checkpoint"
    return None


def tidy(folder: Path, *, after: int) -> None:
    """Before going on from step `after`: unfinished checkpoints go, later ones are renamed and not taken again."""
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path)
    for path in found(folder):
        if step_of(path) > after:
            aside = path.with_name(path.name + _ASIDE)
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)


def cut_logs(folder: Path, *, rank: int, workers: int, after: int) -> None:
    """Keep the rows of the rank's step log before step `after`; rank 0 also cuts those of ranks that are no more."""
    for log in folder.glob("rank*.steps.jsonl"):
        number = int(log.name.removeprefix("rank").partition(".")[0])
        if number == rank or (rank == 0 and number >= workers):
            # A process that was killed may have left half of a row.
            lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
            write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] < after), log)


def _await(files: list[Path]) -> None:
    """All ranks have written; where the folder is shared by machines, their files may take a moment to be seen."""
    deadline = time.monotonic() + _PATIENCE_S
    while missing := [file for file in files if not file.exists()]:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{missing[0]} was written by its rank and is not seen by rank 0: with ranks on several machines, name"
                " an --out on a file system that they share"
            )
        time.sleep(_POLL_S)


def _remove(path: Path) -> None:
    """Under another name first: a checkpoint that is half deleted is not taken for one."""
    going = path.with_name(path.name + _UNFINISHED)
    path.rename(going)
    shutil.rmtree(going)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
