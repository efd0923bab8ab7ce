"""`load_start`: parameters and buffers of an earlier run as the start of another one (fine-tuning)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.files import real_path
from syncline.train.checkpoint import files
from syncline.train.config import CHECKPOINTS

_SHOWN = 3


def find_start(text: str) -> Path:
    """The newest undamaged checkpoint of a run folder, or the checkpoint that is named."""
    path = real_path(Path(text).expanduser())
    if not path.is_dir():
        raise UsageError(f"--start {text}: there is no such folder: name a run folder with checkpoints")
    candidates = files.list_checkpoints(path / CHECKPOINTS) if path.parent.name != CHECKPOINTS else [path]
    for candidate in candidates:
        if files.find_damage(candidate) is None:
            return candidate
    raise UsageError(
        f"there is no undamaged checkpoint in {text} to start from: name the folder of a run with --checkpoint-every"
    )


@torch.no_grad()
def load_start(path: Path, modules: Sequence[nn.Module]) -> str:
    """Copy what the checkpoint has under the same name and shape; says in one sentence what stays new.

    A checkpoint without any parameter of the model is a `UsageError`.
    """
    head = files.read(path, 0)
    new: list[str] = []
    loaded = 0
    for number, module in enumerate(modules):
        parts = [head[key][number] if number < len(head[key]) else {} for key in ("parameters", "buffers")]
        saved: dict[str, Tensor] = {**parts[0], **parts[1]}
        for name, live in (*module.named_parameters(), *module.named_buffers()):
            if name in saved and saved[name].shape == live.shape:
                live.copy_(saved[name])
                loaded += 1
            else:
                new.append(name)
    if not loaded:
        raise UsageError(f"{path} has no parameter of this model: start from a run of the same model")
    shown = ", ".join(new[:_SHOWN]) + (f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else "")
    rest = f"; new: {shown}" if new else ""
    return f"the model starts with {loaded} tensors of {path.parent.parent.name}/{path.name}{rest}"
