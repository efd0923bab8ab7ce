"""Codec state of every rank as files in another framework's checkpoint folder."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from syncline import codecs
from syncline.engine.launch.units import STEP_KEY

_log = logging.getLogger("syncline")


def save_rank_state(state: Mapping[str, Tensor], folder: Path, *, rank: int, world: int, model: int = 0) -> None:
    """Write this rank's codec state into the folder; the file is complete or not there.

    Files that another number of ranks has left there are older, and are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"syncline-model{model}-rank*-of-*.pt"):
        if not path.name.endswith(f"-of-{world}.pt"):
            path.unlink(missing_ok=True)
    path = folder / _name(model, rank, world)
    partial = path.with_suffix(".partial")
    torch.save(dict(state), partial)
    partial.replace(path)


def load_rank_state(folder: Path, *, rank: int, world: int, model: int = 0) -> dict[str, Tensor]:
    """This rank's codec state from the folder.

    If another number of ranks wrote it, every rank gets the mean of their residuals, which is what is still to be
    applied. A checkpoint without codec state gives an empty state, with a warning.
    """
    mine = folder / _name(model, rank, world)
    if mine.exists():
        return _read(mine)
    worlds = sorted({int(path.stem.rpartition("-")[2]) for path in folder.glob(f"syncline-model{model}-rank*-of-*.pt")})
    for other in worlds:
        paths = [folder / _name(model, r, other) for r in range(other)]
        if all(path.exists() for path in paths):
            states = [_read(path) for path in paths]
            return codecs.reshard(states, 1, keep="mean")[0]
    _log.warning("syncline: %s has no codec state of all ranks: residuals start at zero", folder)
    return {STEP_KEY: torch.tensor(0)}


def _name(model: int, rank: int, world: int) -> str:
    return f"syncline-model{model}-rank{rank}-of-{world}.pt"


def _read(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state
