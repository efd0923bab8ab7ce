"""The models, DDP modules and optimizers that a recording knows: each is hooked once, and missing ones are noted."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline._compat.compiled import is_compiled
from syncline.trace.record.collectives import hook_ddp_buckets
from syncline.trace.record.loop_hooks import LoopHooks
from syncline.trace.record.module_hooks import find_models, hook_module

T = TypeVar("T")


class _IdentitySet(Generic[T]):
    """Objects that may not be hashable, without keeping them alive."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> bool:
        """Whether the object is new here."""
        known = self._known.get(id(item))
        if known is not None and known() is item:
            return False
        self._known[id(item)] = weakref.ref(item)
        return True

    def living(self) -> list[T]:
        return [item for known in self._known.values() if (item := known()) is not None]


class KnownModels:
    """What is recorded so far. `give_up` is called when a hook cannot be installed in the middle of a step."""

    def __init__(self, hooks: LoopHooks, give_up: Callable[[Exception], None]) -> None:
        self._hooks, self._give_up = hooks, give_up
        self._models: _IdentitySet[nn.Module] = _IdentitySet()
        self._ddp_modules: _IdentitySet[DistributedDataParallel] = _IdentitySet()
        self._optimizers: _IdentitySet[torch.optim.Optimizer] = _IdentitySet()

    def add(self, model: nn.Module) -> None:
        """Record the forward passes of a model and the buckets of its DDP modules."""
        if self._models.add(model):
            hook_module(self._hooks, model)
            self._hook_buckets(model)

    def find(self) -> None:
        """Add all models that the loop calls until the end of the next step, also those that nobody named."""
        # Hooks on all modules would make a compiled model compile once more.
        if not any(is_compiled(model) for model in self._models.living()):
            find_models(self._hooks, seen=self._safely(self._hook_buckets), use=self._safely(self.add))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """If the optimizer is new, look for its model: the second one of a GAN may not have been called before."""
        if self._optimizers.add(optimizer):
            self.find()

    def missing(self) -> list[str]:
        """Notes about optimizers that update no parameter of a known model."""
        recorded = {id(p) for model in self._models.living() for p in model.parameters()}
        notes = []
        for optimizer in self._optimizers.living():
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if updated and not updated & recorded:
                name = type(optimizer).__name__
                notes.append(f"the forward passes of the model that {name} updates were not found: name it with model=")
        return notes

    def _hook_buckets(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and self._ddp_modules.add(module):
                hook_ddp_buckets(self._hooks, module)

    def _safely(self, use: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def call(model: nn.Module) -> None:
            try:
                use(model)
            except Exception as error:
                self._give_up(error)

        return call
