"""State of a codec: plain tensors by parameter name, and random seeds derived from name and step.

A state dict has flat names, `"<parameter>.<key>"`, and nothing but tensors: it loads with `weights_only=True`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Coder, cast

Tensors = Mapping[str, Tensor]


class Memory(Protocol):
    """Memory that is used again, for devices on which new memory is slow."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, passing: bool = False) -> Tensor:
        """A tensor without values; `passing`: it is dropped before the run's driver goes on with another one."""
        ...


@dataclass
class State:
    """What a codec knows in one step: its tensors, parameter names, step, rank, world size and seeds.

    `names` are the parameters of this batch: one, or several that are sent as one. `lengths` are the sizes of several
    parameters that are concatenated; None for one parameter, and for stacked matrices. `rank` and `world` count the
    ranks that contribute gradients.
    """

    tensors: Tensors = field(default_factory=dict)
    names: tuple[str, ...] = ("grad",)
    step: int = 0
    rank: int = 0
    world: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] | None = None
    compensated: Tensor | None = None
    reusable: bool = False
    """Whether the memory of `compensated` is this run's own."""
    memory: Memory | None = None
    """Where large tensors are made; None: in new memory."""
    drawn: list[Tensor] = field(default_factory=list)
    """Random numbers that were used, for those who keep their addresses."""

    def get(self, key: str, default: Tensor) -> Tensor:
        """The tensor kept under `key` in the last committed step, else `default`."""
        return self.tensors.get(key, default)

    @property
    def dense(self) -> Coder:
        """The coder that writes plain values in the gradient's own precision."""
        return cast(torch.float32 if self.dtype == torch.float64 else self.dtype)

    @property
    def shared_seed(self) -> int:
        """A seed for this step and parameter, the same on every rank."""
        return derive(self.seed, self.step, *self.names)

    @property
    def rank_seed(self) -> int:
        """A seed for this step and parameter, different on every rank."""
        return derive(self.seed, self.step, self.rank, "rank", *self.names)

    def random(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform numbers in [-1, 1), (parameters, *shape): the same on every rank and in every step.

        They depend on the parameter's name, not on the grouping. They are generated once and cached.
        """
        self.drawn.append(_random(self.seed, self.names, tuple(shape), device))
        return self.drawn[-1]

    def compensate(self, grad: Tensor, *, scratch: bool = False) -> Tensor:
        """Add the residual of earlier steps; the new residual is computed against the returned tensor.

        `scratch` allows to overwrite the gradient.

        A codec with `feedback=True` gets a compensated gradient. A codec that must change the gradient first
        declares `feedback="own"` and calls this itself.
        """
        error = self.tensors.get("error")
        self.reusable = scratch or error is not None
        if error is None:
            self.compensated = grad
        elif scratch and grad.dtype == error.dtype:
            self.compensated = grad.add_(error.view(grad.shape))
        else:
            self.compensated = grad + error.view(grad.shape)
        return self.compensated

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of two batches of matrices, for the result of the run."""
        if self.memory is None:
            return a @ b
        return torch.bmm(a, b, out=self.memory.empty((*a.shape[:2], b.shape[2]), a.dtype, passing=True))


@lru_cache(maxsize=2048)
def _random(seed: int, names: tuple[str, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    seeds = [derive(seed, 0, "random", name) for name in names]
    return torch.stack([ops.uniform(shape, seed=s, device=device) * 2 - 1 for s in seeds])


def derive(*parts: object) -> int:
    """A 62-bit number from the text of `parts`, the same in every process and version."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def flatten(states: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """`{"fc.weight": {"error": t}}` as `{"fc.weight.error": t}`."""
    return {f"{name}.{key}": tensor for name, tensors in states.items() for key, tensor in tensors.items()}


def unflatten(flat: Tensors) -> dict[str, dict[str, Tensor]]:
    """Undo `flatten`; a key holds no dot, a parameter's name may."""
    out: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        name, dot, key = path.rpartition(".")
        if not dot:
            raise ValueError(f"'{path}' is not a state entry: use '<parameter>.<key>'")
        out.setdefault(name, {})[key] = tensor
    return out


def reshard(states: Sequence[Tensors], new_world: int, *, keep: str = "sum") -> list[dict[str, Tensor]]:
    """Convert flat state dicts, one per rank, to another number of ranks.

    The sum of the residuals is kept and divided evenly. `keep="mean"` keeps their mean instead: with averaged
    gradients, that is the update that is still to be applied. All other tensors are averaged, so tensors that are
    the same on all ranks (factors) do not change.
    """
    if new_world < 1 or not states:
        raise ValueError(f"{len(states)} states for {new_world} ranks: both must be at least 1")
    if keep not in ("sum", "mean"):
        raise ValueError(f"keep is '{keep}': use 'sum' or 'mean'")
    if any(state.keys() != states[0].keys() for state in states):
        raise ValueError("the ranks' states hold different names: take them from the same step")
    scale = len(states) / new_world if keep == "sum" else 1.0
    merged = {}
    for path in states[0]:
        mean = torch.stack([state[path] for state in states]).double().mean(0)
        factor = scale if path.rpartition(".")[2] == "error" else 1.0
        merged[path] = (mean * factor).to(states[0][path].dtype)
    return [{path: tensor.clone() for path, tensor in merged.items()} for _ in range(new_world)]
