"""Checkpoint files of a pipeline: written atomically, read without running code; and random states for them."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.errors import DamagedCheckpoint
from syncline.files import writing

_NEEDED = {"model", "optimizer", "frozen", "steps", "random", "extra"}


def write_checkpoint(state: Mapping[str, Any], path: str | Path) -> None:
    """Replace the file at `path` by this state, through a temporary file beside it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target):
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The state in a file of `write_checkpoint`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a damaged file makes torch raise
        raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}): take an older checkpoint") from error
    if not isinstance(state, dict) or not state.keys() >= _NEEDED:
        raise DamagedCheckpoint(f"{path} is not a checkpoint of a pipeline: give the file that Pipeline.save wrote")
    return state


def random_state(device: torch.device) -> list[Tensor]:
    """The random state of this process: of the CPU, and of the GPU if it trains on one."""
    return [torch.get_rng_state()] if device.type == "cpu" else [torch.get_rng_state(), torch.cuda.get_rng_state()]


def set_random_state(state: Sequence[Tensor], device: torch.device) -> None:
    """Continue from a `random_state`, which may come from another kind of device."""
    host, *gpu = state
    torch.set_rng_state(host)
    if gpu and device.type == "cuda":
        torch.cuda.set_rng_state(gpu[0], device)
