"""Detection of wrappers that synchronise the same model: DDP, FSDP, DeepSpeed, DataParallel, and Horovod's optimizer.

Classes are recognised by name and package, so nothing is imported. Before attach: the model, one of its modules, or a
live wrapper that holds its parameters. After attach: torch tells us when a module becomes part of another one, and a
wrapper's module does (`attached_models.py`).
"""

import gc
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from syncline._compat.autograd import accumulator_is_held
from syncline._compat.fsdp import is_fsdp_managed
from syncline.errors import UsageError


class Wrapper(NamedTuple):
    """A class that synchronises the model inside it, and what to do instead of using it with `attach`."""

    package: str
    name: str
    instead: str


_PLAIN = "leave one of the two out"
_WRAPPERS = (
    Wrapper(
        "torch",
        "DistributedDataParallel",
        "attach the plain model, or keep DDP and call ddp_model.register_comm_hook(*syncline.ddp_hook(codec))",
    ),
    Wrapper("syncline", "DistributedDataParallel", "its compress= names the codec, and its .sync is the engine"),
    Wrapper("torch", "DataParallel", "start one process per device, and attach the plain model"),
    Wrapper("torch", "FullyShardedDataParallel", f"attach works on plain replicas, {_PLAIN}"),
    Wrapper("torch", "FSDPModule", "for replicas of sharded models use syncline.fsdp.attach(model, replicate=...)"),
    Wrapper("deepspeed", "DeepSpeedEngine", _PLAIN),
    Wrapper("apex", "DistributedDataParallel", _PLAIN),
    Wrapper("fairscale", "ShardedDataParallel", _PLAIN),
    Wrapper("fairscale", "FullyShardedDataParallel", f"attach works on plain replicas, {_PLAIN}"),
    Wrapper("megatron", "DistributedDataParallel", _PLAIN),
)


def wrapper_of(kind: type) -> Wrapper | None:
    """The known wrapper that this class is, or is derived from."""
    classes = [(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__]
    return next((wrapper for wrapper in _WRAPPERS if (wrapper.package, wrapper.name) in classes), None)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a wrapper synchronises this model already."""
    wrapper = next((w for w in map(wrapper_of, map(type, model.modules())) if w is not None), None)
    if wrapper is None and any(is_fsdp_managed(module) for module in model.modules()):
        wrapper = wrapper_of_name("FullyShardedDataParallel")
    if wrapper is None:
        wrapper = _around(model)
    if wrapper is not None:
        raise UsageError(f"the model is wrapped in {_title(wrapper)}, which synchronises it, too: {wrapper.instead}")


def refuse_horovod(optimizer: torch.optim.Optimizer) -> None:
    """Raise for Horovod's DistributedOptimizer, a class that is made for each optimizer."""
    if any(base.__module__.partition(".")[0] == "horovod" for base in type(optimizer).__mro__):
        raise UsageError(
            "the optimizer is Horovod's DistributedOptimizer, which averages gradients, too: give the optimizer that"
            " it was made from"
        )


def refuse_around_attached(parent: nn.Module, child: nn.Module, attached: Collection[int]) -> None:
    """Raise if `parent` is a wrapper that is made around a module with attached parameters (given by their ids)."""
    wrapper = wrapper_of(type(parent))
    if wrapper is not None and any(id(p) in attached for p in child.parameters()):
        raise UsageError(
            f"the model is attached, and {_title(wrapper)} around it would synchronise it again: {wrapper.instead}"
        )


def wrapper_of_name(name: str) -> Wrapper:
    """torch's wrapper of this name."""
    return next(wrapper for wrapper in _WRAPPERS if wrapper.package == "torch" and wrapper.name == name)


def _around(model: nn.Module) -> Wrapper | None:
    """The wrapper of a live module that holds this model's parameters.

    The search takes some 20 ms, so there must be a reason: somebody holds the nodes that accumulate gradients (DDP and
    libraries like it do, to hook them), or wrappers without such hooks are possible here.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    possible = torch.cuda.device_count() > 1 or "deepspeed" in sys.modules
    if not possible and not any(accumulator_is_held(p) for p in trained):
        return None
    mine = {id(p) for p in model.parameters()}
    if _holder(mine) is not None:
        gc.collect()  # it may be one that nobody can use any more
    return _holder(mine)


def _holder(parameters: set[int]) -> Wrapper | None:
    kinds = {kind: wrapper for kind in _subclasses(nn.Module) if (wrapper := wrapper_of(kind)) is not None}
    # Our own wrapper attaches its module: `attached_models` knows about that one.
    kinds = {kind: wrapper for kind, wrapper in kinds.items() if wrapper.package != "syncline"}
    for found in gc.get_referrers(*kinds):  # an instance refers to its class
        if type(found) in kinds and not parameters.isdisjoint(map(id, found.parameters())):
            return kinds[type(found)]
    return None


def _subclasses(kind: type) -> set[type]:
    found: set[type] = set()
    waiting: list[Any] = [kind]
    while waiting:
        new = set(type.__subclasses__(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _title(wrapper: Wrapper) -> str:
    return wrapper.name if wrapper.package == "torch" else f"{wrapper.package}'s {wrapper.name}"
