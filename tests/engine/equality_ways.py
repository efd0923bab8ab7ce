"""The two ways to run a loop, torch DDP and `syncline.attach`, and the record of a run."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import slow_exchange
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality_models import OPTIMIZERS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline import plan

DEVICE = ["cpu"]
"""Where models and batches are; `test_engine_gpu.py` sets it in its ranks."""


class Ddp:
    """The reference: torch's DistributedDataParallel."""

    def __init__(self, group: dist.ProcessGroup, exchange: str | None = None) -> None:
        self.group = group
        self.nets: dict[int, tuple[DistributedDataParallel, bool]] = {}

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool) -> nn.Module:
        net = DistributedDataParallel(model, process_group=self.group, find_unused_parameters=unused)
        self.nets[id(model)] = net, unused
        return net

    def again(self, model: nn.Module) -> nn.Module:
        """DDP does not follow `requires_grad`: a new one is needed, after the old one has let go of the parameters."""
        unused = self.nets.pop(id(model))[1]
        gc.collect()
        return self.attach(model, (), unused)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.nets[id(model)][0].no_sync()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.nets.clear()


class Ours:
    """`syncline.attach` over a slow exchange; with 2 and 3 ranks every module is a unit, and large ones are cut."""

    attached = 0

    def __init__(self, group: dist.ProcessGroup, exchange: str | None = None) -> None:
        self.cut = dist.get_world_size(group) in (2, 3)
        self.group, self.exchange = group, exchange
        self.syncs: dict[int, Any] = {}
        self.launched = slow_exchange.launched[0]

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool) -> nn.Module:
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        # Tuning measures the machine for a while: every tenth will do, and those of two and three ranks without a plan.
        Ours.attached += 1
        how: dict[str, Any] = {"exchange": self.exchange, "tune": self.cut or Ours.attached % 10 == 0}
        if self.cut and not hasattr(model, "_orig_mod") and all(p.requires_grad for p in model.parameters()):
            how = {"plan": fine_plan(model, self.exchange)}
        self.syncs[id(model)] = syncline.attach(model, optimizer, process_group=self.group, **how)
        return model

    def again(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.syncs[id(model)].no_sync()
        return context

    def wait(self) -> None:
        for sync in self.syncs.values():
            sync.wait()

    def close(self) -> None:
        syncs, self.syncs = list(self.syncs.values()), {}
        for sync in syncs:
            sync.close()
        if self.exchange and syncs and self.group.size() > 1:
            assert slow_exchange.launched[0] > self.launched, "the slow exchange was not used"


def fine_plan(model: nn.Module, exchange: str | None) -> plan.Plan:
    """The default plan would send these small models as one unit."""
    shapes = [plan.Shape(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    return plan.default_plan(shapes, exchange=exchange, group_bytes=0, part_bytes=72 << 10)


@dataclass
class Run:
    """One case in one way on one rank: what its function builds, and what it saw."""

    way: Any
    rank: int
    world: int
    kind: str
    steps: int
    seen: dict[str, list[Tensor]] = field(default_factory=lambda: {"losses": [], "reads": []})
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def optimizer(self, parameters: Any, **more: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](parameters, **more)

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer, unused: bool = False) -> nn.Module:
        """The callable that trains `model`: DDP's wrapper, or the model itself."""
        model.to(DEVICE[0])
        self.models.append(model)
        self.optimizers.extend(optimizers)
        net: nn.Module = self.way.attach(model, optimizers, unused)
        return net

    def batch(self, step: int, micro: int = 0, shape: tuple[int, ...] = (8, 32), targets: int = 10) -> Any:
        """Inputs and targets of this rank: the same numbers in both ways."""
        generator = torch.Generator().manual_seed(1 + step * 1009 + micro * 101 + self.rank * 7)
        x, y = torch.randn(shape, generator=generator), torch.randn(shape[0], targets, generator=generator)
        return x.to(DEVICE[0]), y.to(DEVICE[0])

    def loss(self, net: Callable[..., Tensor], step: int, micro: int = 0, **more: Any) -> Tensor:
        """Forward and loss of one batch, noted."""
        x, y = self.batch(step, micro, **more)
        return self.noted(F.mse_loss(net(x).to(y.dtype), y))

    def noted(self, loss: Tensor) -> Tensor:
        self.seen["losses"].append(loss.detach().clone())
        return loss

    def read(self, *tensors: Tensor) -> None:
        """Show what the case has read at this point."""
        self.seen["reads"].extend(t.detach().clone() for t in tensors)

    def finish(self) -> dict[str, list[Tensor]]:
        """Parameters are read first, without a wait: the last updates may be in flight."""
        seen = self.seen
        seen["parameters"] = [p.detach().clone() for m in self.models for p in m.parameters()]
        self.way.wait()
        # Every rank has buffers of its own after its last forward: rank 0's are the model's.
        seen["buffers"] = [b.clone() for m in self.models for b in m.buffers() if self.rank == 0]
        seen["optimizer"] = [
            t.clone() for o in self.optimizers for t in tensors(o.state_dict()["state"])
        ]  # fmt: skip
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
