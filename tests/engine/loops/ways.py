"""The ways in which `syncline.attach` runs a loop, and the record of a run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import syncline
from loops import slow_exchange
from loops.models import OPTIMIZERS
from syncline import plan
from syncline.errors import UsageError

DEVICE = ["cpu"]
"""Where models and batches are; `test_engine_gpu.py` sets it in its ranks."""
CAPTURE = [False]
"""Whether launches are captured as CUDA graphs; only on a GPU."""
SLOW = "loops.slow_exchange:slow(ms=1.5)"
POWERSGD = "powersgd(rank=2)"
WAYS = ("dense", "fine", "bf16", "powersgd", "reducer")
"""dense: `attach` as it is. fine: a unit for each module, large ones cut, over an exchange that answers late.

reducer: several buckets, averaged by torch's reducer."""
START = "start"
"""A sixth way, of all rows that have dense and reducer: `attach` with tuning, which begins with torch's reducer."""
CODECS = {"dense": "none", "fine": "none", "bf16": "bf16", "powersgd": POWERSGD, "reducer": "none", START: "none"}


class Ours:
    """`syncline.attach` in one of the ways."""

    ours = True

    def __init__(self, group: dist.ProcessGroup, way: str, *, tune: bool = False) -> None:
        self.group, self.way, self.tune = group, way, tune
        self.syncs: dict[int, Any] = {}
        self.launched = slow_exchange.launched[0]

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool, **more: Any) -> nn.Module:
        """The model itself."""
        import_module("syncline.engine.attach").START = "reducer" if self.way == START else "overlap"
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers or None
        how = {"process_group": self.group, "capture": CAPTURE[0], **self.options(model), **more}
        self.syncs[id(model)] = syncline.attach(model, optimizer, **how)
        return model

    def options(self, model: nn.Module) -> dict[str, Any]:
        """What the way asks of `attach`."""
        if self.way == "fine":
            return {"plan": fine_plan(model)}
        if self.way == "reducer":
            return {"plan": plan.bucket_plan(shapes_of(model), bucket_bytes=3 << 10)}
        if self.way == START:
            return {"tune": True}
        return {"compress": None if self.way == "dense" else CODECS[self.way], "tune": self.tune}

    def again(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.syncs[id(model)].no_sync()
        return context

    def wait(self) -> None:
        for sync in self.syncs.values():
            sync.wait()

    def leave(self, model: nn.Module) -> None:
        self.syncs.pop(id(model)).close()

    def save(self, model: nn.Module) -> Any:
        return self.syncs[id(model)].state_dict()

    def load(self, model: nn.Module, state: Any) -> None:
        self.syncs[id(model)].load_state_dict(state)

    def close(self) -> None:
        syncs, self.syncs = list(self.syncs.values()), {}
        for sync in syncs:
            sync.close()
        if self.way == "fine" and any(sync.world > 1 and sync.step for sync in syncs):
            assert slow_exchange.launched[0] > self.launched, "the slow exchange was not used"


def fine_plan(model: nn.Module) -> plan.Plan:
    """The default plan would send these small models as one unit."""
    return plan.default_plan(shapes_of(model), exchange=SLOW, group_bytes=0, part_bytes=3 << 10)


def shapes_of(model: nn.Module) -> list[plan.Shape]:
    """The parameters that are averaged."""
    averaged = [(name, p) for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()]
    return [plan.shape_of(name, p) for name, p in averaged]


@dataclass
class Run:
    """One row in one way on one rank: what its function builds, and what it saw."""

    way: Any
    rank: int
    world: int
    kind: str
    steps: int
    seen: dict[str, list[Tensor]] = field(default_factory=lambda: {"losses": [], "reads": []})
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Whether this is `attach`, not the reference."""
        return bool(self.way.ours)

    def optimizer(self, parameters: Any, **more: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](parameters, **more)

    def attach(
        self, model: nn.Module, *optimizers: torch.optim.Optimizer, unused: bool = False, **more: Any
    ) -> nn.Module:
        """The callable that trains `model`: DDP's wrapper, or the model itself."""
        model.to(DEVICE[0])
        self.models += [model] if all(m is not model for m in self.models) else []
        self.optimizers += [o for o in optimizers if all(o is not known for known in self.optimizers)]
        net: nn.Module = self.way.attach(model, optimizers, unused, **more)
        return net

    def refuses(self, what: Callable[[], Any], match: str) -> None:
        """`attach` refuses this with a sentence; the reference does not try."""
        if not self.ours:
            return

        def attempt() -> None:
            try:
                what()
            except UsageError:
                self.way.close()  # here, so that it knows the error: half a backward pass cannot be finished
                raise

        with pytest.raises(UsageError, match=match):
            attempt()
        self.models, self.optimizers = [], []

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate locally in this context."""
        context: AbstractContextManager[None] = self.way.no_sync(model)
        return context

    def batch(self, step: int, micro: int = 0, shape: tuple[int, ...] = (8, 32), targets: int = 10) -> Any:
        """Inputs and targets of this rank: the same numbers in all ways."""
        generator = torch.Generator().manual_seed(1 + step * 1009 + micro * 101 + self.rank * 7)
        x, y = torch.randn(shape, generator=generator), torch.randn(shape[0], targets, generator=generator)
        return x.to(DEVICE[0]), y.to(DEVICE[0])

    def tokens(self, step: int, vocabulary: int = 64, shape: tuple[int, int] = (4, 9)) -> Tensor:
        """Random tokens of this rank."""
        generator = torch.Generator().manual_seed(step * 11 + self.rank)
        return torch.randint(vocabulary, shape, generator=generator).to(DEVICE[0])

    def loss(self, net: Callable[..., Tensor], step: int, micro: int = 0, **more: Any) -> Tensor:
        """Forward and loss of one batch, noted."""
        x, y = self.batch(step, micro, **more)
        return self.noted(F.mse_loss(net(x).to(y.dtype), y))

    def noted(self, loss: Tensor) -> Tensor:
        """The same loss, which is compared."""
        self.seen["losses"].append(loss.detach().clone())
        return loss

    def read(self, *tensors: Any) -> None:
        """Show what the row has read at this point; None stands for a missing gradient."""
        gone = torch.tensor(float("nan"))
        self.seen["reads"].extend(gone if t is None else t.detach().clone() for t in tensors)

    def finish(self) -> dict[str, list[Tensor]]:
        """Parameters are read first, without a wait: the last updates may be in flight."""
        seen = self.seen
        seen["parameters"] = [p.detach().clone() for m in self.models for p in m.parameters()]
        self.way.wait()
        # Every rank has buffers of its own after its last forward: rank 0's are the model's.
        seen["buffers"] = [b.clone() for m in self.models for b in m.buffers() if self.rank == 0]
        seen["optimizer"] = [t.clone() for o in self.optimizers for t in tensors(o.state_dict()["state"])]
        return seen


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in a nested state, in one order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from tensors(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors(item)
