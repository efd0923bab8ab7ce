"""What a rank's part of a checkpoint holds, and how a rank takes it up again.

Rank 0's part has the parameters and the optimizers' state, which are the same on all ranks; every part has what is the
rank's own: buffers, the synchronisers' state (error feedback), random states and the history of losses and times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.codecs.state import derive, reshard
from syncline.errors import UsageError
from syncline.train.checkpoint import files as checkpoint
from syncline.train.config import Train
from syncline.train.models import Phase
from syncline.train.rank.loop import Outcome
from syncline.train.rank.randomness import random_state, seed_all, set_random_state
from syncline.train.strategies import Context, Synchroniser


@dataclass(frozen=True)
class Snapshots:
    """One rank's checkpoints: `save` and `restore` see all that a step depends on."""

    folder: Path
    strategy: str
    train: Train
    steps: int
    """Steps an epoch."""
    context: Context
    device: torch.device
    phases: Sequence[Phase]
    synchronisers: Sequence[Synchroniser]
    optimizers: Sequence[torch.optim.Optimizer]

    def save(self, outcome: Outcome) -> None:
        """Write the checkpoint of the steps done so far, with all other ranks."""
        rank, workers = self.context.rank, self.context.workers
        content: dict[str, Any] = {
            "format": checkpoint.FORMAT,
            "step": len(outcome.losses),
            "rank": rank,
            "workers": workers,
            "strategy": self.strategy,
            "train": asdict(self.train),
            "steps": self.steps,
            "history": _history(outcome),
            "random": random_state(self.device),
            "buffers": [dict(phase.module.named_buffers()) for phase in self.phases],
            "synchronisers": [synchroniser.state_dict() for synchroniser in self.synchronisers],
        }
        if rank == 0:
            content["parameters"] = [dict(phase.module.named_parameters()) for phase in self.phases]
            content["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        plain = {key: _plain(value, key) for key, value in content.items()}
        checkpoint.write(self.folder, plain, rank=rank, workers=workers, meet=self._meet)

    def restore(self, path: Path) -> Outcome:
        """Take up the checkpoint, and make the folder ready to go on from there; returns the history."""
        rank, workers = self.context.rank, self.context.workers
        head = checkpoint.read(path, 0)
        if head["steps"] != self.steps:
            raise UsageError(
                f"an epoch had {head['steps']} steps and now has {self.steps}: the data set is not the one of {path}"
            )
        step, same_world = head["step"], head["workers"] == workers
        own = head if rank == 0 or not same_world else checkpoint.read(path, rank)
        old = [own] if same_world else [checkpoint.read(path, r, mapped=True) for r in range(head["workers"])]
        for i, phase in enumerate(self.phases):
            _copy(dict(phase.module.named_parameters()), head["parameters"][i], path)
            _copy(dict(phase.module.named_buffers()), own["buffers"][i], path)
            self.optimizers[i].load_state_dict(head["optimizers"][i])
            if self.strategy == head["strategy"]:
                states = [part["synchronisers"][i] for part in old]
                # Gradients are averaged, so the mean of the residuals is what is owed, whatever the number of ranks.
                state = states[0] if same_world else reshard(states, workers, keep="mean")[rank]
                self.synchronisers[i].load_state_dict(state)
        outcome = _merged([part["history"] for part in old])
        outcome.resumed_at.append(step)
        if rank == 0:
            checkpoint.tidy(self.folder, after=step)
        if same_world:
            set_random_state(own["random"], self.device)
        else:
            seed_all(derive("resume", self.train.seed, rank, step))
        self._meet()
        return outcome

    def _meet(self) -> None:
        if dist.is_initialized():
            dist.barrier(group=self.context.group)


def _history(outcome: Outcome) -> dict[str, Any]:
    """Tensors for what grows with every step: compact, and exact."""
    return {
        "losses": torch.tensor(outcome.losses, dtype=torch.float64),
        "step_ms": torch.tensor(outcome.step_ms, dtype=torch.float64),
        "epochs": [{k: v for k, v in record.items() if k != "wire"} for record in outcome.epochs],
        "epoch_s": outcome.epoch_s,
        "accuracy": outcome.accuracy,
        "resumed_at": outcome.resumed_at,
    }


def _merged(parts: Sequence[Mapping[str, Any]]) -> Outcome:
    """One rank's history; of several ranks (another world size goes on) mean losses and longest times."""
    known = [part["accuracy"] for part in parts if part["accuracy"] is not None]
    return Outcome(
        losses=torch.stack([part["losses"] for part in parts]).mean(0).tolist(),
        step_ms=torch.stack([part["step_ms"] for part in parts]).amax(0).tolist(),
        epochs=[
            {
                **records[0],
                "train_s": max(record["train_s"] for record in records),
                "loss": sum(record["loss"] for record in records) / len(records),
            }
            for records in zip(*(part["epochs"] for part in parts), strict=True)
        ],
        epoch_s=max(part["epoch_s"] for part in parts),
        accuracy=sum(known) / len(known) if known else None,
        resumed_at=list(parts[0]["resumed_at"]),
    )


@torch.no_grad()
def _copy(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    """In place: wrappers and optimizers hold the tensors themselves."""
    for name in sorted(live.keys() | saved.keys()):
        if name not in live or name not in saved or live[name].shape != saved[name].shape:
            raise UsageError(f"the model has changed since {path}: '{name}' is not as it was")
        live[name].copy_(saved[name])


def _plain(value: Any, where: str) -> Any:
    """The value with its tensors detached, on the CPU and without the rest of a larger storage.

    Anything that `torch.load(weights_only=True)` would refuse is refused now, while nothing is lost.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, torch.dtype | torch.device):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise UsageError(
        f"a checkpoint cannot hold {where}, a {type(value).__name__}: only tensors and plain values survive;"
        " leave --checkpoint-every out"
    )
