"""The content of a rank's part of a checkpoint: `Snapshots.save` writes it, `Snapshots.restore` loads it.

Rank 0's part has the parameters and the optimizers' state, which are the same on all ranks. Every part has the rank's
own state: buffers, the synchronisers' state (error feedback), random states and the history of losses and times.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.codecs.state import derive, reshard
from syncline.errors import DamagedCheckpoint, PeerError, UsageError, short
from syncline.files import reason
from syncline.train.checkpoint import files
from syncline.train.checkpoint.content import FORMAT
from syncline.train.checkpoint.history import History
from syncline.train.checkpoint.randomness import random_state, seed_all, set_random_state
from syncline.train.rank.loop import Loop

_NUMBERS = (int, float, Tensor)


@dataclass(frozen=True)
class Snapshots:
    """Saves and restores everything that a training step of this rank depends on."""

    folder: Path
    strategy: str

    def save(self, loop: Loop, history: History) -> Path:
        """Write a checkpoint after the last step of `history`, and return its path; all ranks call this together."""
        rank, workers, phases = loop.context.rank, loop.context.workers, loop.workload.phases
        whole = [synchroniser.whole_state() for synchroniser in loop.synchronisers]
        content: dict[str, Any] = {
            "format": FORMAT,
            "step": len(history.losses),
            "rank": rank,
            "workers": workers,
            "strategy": self.strategy,
            "train": asdict(loop.train),
            "steps": loop.steps,
            "history": history.to_tensors(),
            "random": random_state(loop.device),
            "buffers": [dict(phase.module.named_buffers()) for phase in phases],
            "synchronisers": [synchroniser.state_dict() for synchroniser in loop.synchronisers],
            "freeze": [{} if s.freeze is None else s.freeze.state_dict() for s in loop.synchronisers],
        }
        if rank == 0:
            content["parameters"] = [
                dict(phase.module.named_parameters()) if state is None else state["model"]
                for phase, state in zip(phases, whole, strict=True)
            ]
            content["optimizers"] = [
                optimizer.state_dict() if state is None else state["optimizer"]
                for optimizer, state in zip(loop.optimizers, whole, strict=True)
            ]
            content["pipelines"] = [
                {} if state is None else {key: state[key] for key in state if key not in ("model", "optimizer")}
                for state in whole
            ]
        plain = {key: _plain(value, key) for key, value in content.items()}
        return files.write(self.folder, plain, rank=rank, workers=workers, barrier=lambda: _barrier(loop))

    def restore(self, loop: Loop, path: Path) -> History:
        """Load the checkpoint, prepare the folder for the next ones, and return the history.

        One that does not fit the model, its optimizer or its strategy is a `DamagedCheckpoint`.
        """
        try:
            history = self._load(loop, path)
        except (UsageError, PeerError, dist.DistError):
            raise
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DamagedCheckpoint(f"its state cannot be loaded: {reason(error)}") from error
        _barrier(loop)
        return history

    def _load(self, loop: Loop, path: Path) -> History:
        rank, workers = loop.context.rank, loop.context.workers
        head = files.read(path, 0)
        if head["steps"] != loop.steps:
            raise UsageError(
                f"an epoch had {head['steps']} steps and now has {loop.steps}: the data set is not the one of {path}"
            )
        step, same_world = head["step"], head["workers"] == workers
        own = head if rank == 0 or not same_world else files.read(path, rank)
        parts = [own] if same_world else [files.read(path, r, mapped=True) for r in range(head["workers"])]
        for i, phase in enumerate(loop.workload.phases):
            _check_options(loop.optimizers[i], head["optimizers"][i])
            pipeline = head.get("pipelines", [{}] * (i + 1))[i]
            if loop.synchronisers[i].pipelined:
                state = {"frozen": [], "stages": 0, "steps": step, **pipeline}
                if head["train"].get("pipe") != loop.train.pipe:
                    state["stages"] = 0  # the user asks for other stages than the run had
                buffers = {} if pipeline else own["buffers"][i]  # a pipeline's parameters have the buffers with them
                saved = {"model": {**head["parameters"][i], **buffers}, "optimizer": head["optimizers"][i]}
                loop.synchronisers[i].load_whole_state({**state, **saved})
            else:
                parameters, buffers = dict(phase.module.named_parameters()), dict(phase.module.named_buffers())
                whole = head["parameters"][i]
                if pipeline:  # a rank had the buffers of its stages alone; `whole` has them all, and every tied name
                    _copy(buffers, {name: whole.get(name, buffers[name]) for name in buffers})
                    whole = {name: whole[name] for name in parameters}
                else:
                    _copy(buffers, own["buffers"][i])
                _copy(parameters, whole)
                momenta = [group.get("momentum") for group in loop.optimizers[i].param_groups]
                loop.optimizers[i].load_state_dict(head["optimizers"][i])
                if self.strategy != head["strategy"]:  # one of them may have the momentum in its codec (ring-dgc)
                    for group, momentum in zip(loop.optimizers[i].param_groups, momenta, strict=True):
                        group |= {} if momentum is None else {"momentum": momentum}
            if self.strategy == head["strategy"]:
                states = [part["synchronisers"][i] for part in parts]
                # Gradients are averaged, so the mean of the residuals is kept, whatever the number of ranks.
                state = states[0] if same_world else reshard(states, workers, keep="mean")[rank]
                try:
                    loop.synchronisers[i].load_state_dict(state)
                except UsageError as error:
                    raise DamagedCheckpoint(f"its state is not of '{self.strategy}': {error}") from None
            freeze = loop.synchronisers[i].freeze
            if freeze is not None and i < len(own.get("freeze", [])):
                freeze.load_state_dict(own["freeze"][i])
        history = History.from_tensors([part["history"] for part in parts])
        history.resumed_at.append(step)
        if rank == 0:
            files.remove_later(self.folder, than=step)
        if same_world:
            set_random_state(own["random"], loop.device)
        else:
            seed_all(derive("resume", loop.train.seed, rank, step))
        return history


def _barrier(loop: Loop) -> None:
    if dist.is_initialized():
        dist.barrier(group=loop.context.group)


@torch.no_grad()
def _copy(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy in place, because wrappers and optimizers hold these tensors."""
    for name in sorted(live.keys() | saved.keys()):
        if name not in live or name not in saved or live[name].shape != saved[name].shape:
            raise DamagedCheckpoint(f"it is not of this model: '{name}' is missing or has another shape")
        live[name].copy_(saved[name])


def _check_options(live: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse options of other types, such as text for a learning rate: the optimizer would fail in its first step."""
    for mine, theirs in zip(live.param_groups, saved["param_groups"], strict=True):
        for key, value in mine.items():
            if key != "params" and isinstance(value, _NUMBERS) and not isinstance(theirs.get(key, value), _NUMBERS):
                raise DamagedCheckpoint(f"the optimizer's '{key}' is {short(theirs[key])}, not a number")


def _plain(value: Any, where: str) -> Any:
    """The value with its tensors detached, on the CPU and without the rest of a larger storage.

    Raises for a value that `torch.load(weights_only=True)` would refuse later.
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
        f"a checkpoint cannot hold {where}, a {type(value).__name__}: it holds only tensors and plain values;"
        " leave --checkpoint-every out"
    )
