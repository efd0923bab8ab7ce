"""`syncline.fsdp.attach`: FSDP2 shards inside a node, Syncline averages the shards' gradients between nodes.

torch's hybrid sharding (HSDP) all-reduces the sharded gradients between nodes itself, uncompressed and one group after
the other. Here the model is sharded over one dimension of the mesh only. FSDP2 calls the hooks of a sharded parameter
when its gradient is reduce-scattered. From then on the gradient is ours: a unit (the parameters of one `fully_shard`
call) is launched when all its gradients are there, next to the rest of the backward pass, and averaged in place. The
end of the backward pass waits for all units, so clipping, optimizers and learning rates need no change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from syncline._compat.autograd import after_backward
from syncline._compat.fsdp import fsdp_divide_factor, fsdp_requires_all_reduce
from syncline.engine.process_groups import GroupLike
from syncline.engine.shutdown import close_when_collected
from syncline.errors import UsageError
from syncline.integrations.buckets import BucketExchange
from syncline.integrations.fsdp_checkpoint import ShardPlace, read_saved_state, saved_state
from syncline.integrations.fsdp_units import ShardUnit, local_shard

_CALLER = "syncline.fsdp.attach"
_open: "WeakSet[FsdpSync]" = WeakSet()
"""What `attach` has made and nobody has closed; a model keeps its own alive."""


def attach(
    model: nn.Module, *, replicate: GroupLike, compress: str | None = None, exchange: str | None = None, seed: int = 0
) -> "FsdpSync":
    """Average the gradients of a model that FSDP2 shards over the ranks of a node, with those of the other nodes.

    Call it after `fully_shard` and before the first forward pass, on every rank:

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        sync = syncline.fsdp.attach(model, replicate=mesh["replicate"], compress="powersgd(rank=32) | bf16")

    All replicas start with the values of the first one. `set_requires_gradient_sync` and `set_requires_all_reduce` work
    as with hybrid sharding: gradients that are only accumulated are not sent.

    Args:
        model: The root module, sharded by `fully_shard` over one dimension of the mesh.
        replicate: The ranks that hold the same shard: the other dimension of the mesh, or its process group.
        compress: A codec spec such as `"powersgd(rank=32) | bf16"`. None: no compression, as hybrid sharding.
        exchange: The communication pattern, such as `"ring"`. None: the codec's default.
        seed: Seed of codecs that draw random numbers; the same on all ranks.
    """
    return FsdpSync(model, replicate=replicate, spec=compress or "none", exchange=exchange, seed=seed)


class FsdpSync:
    """The connection between an FSDP2 model and its other replicas; `attach` makes it.

    Every backward pass that exchanges counts as a step. Tensors whose average is not finite keep their residual, so a
    step that a GradScaler skips changes nothing.
    """

    def __init__(
        self, model: nn.Module, *, replicate: GroupLike, spec: str, exchange: str | None, seed: int
    ) -> None:  # fmt: skip
        parameters = _checked_parameters(model)
        if any(id(p) in sync._unit_of for sync in _open for p in parameters.values()):
            raise UsageError("this model is attached already: close() the first attachment before attaching again")
        self._exchange = BucketExchange(spec, pattern=exchange, process_group=replicate, seed=seed, caller=_CALLER)
        self._parameters = parameters
        mesh: DeviceMesh = next(iter(parameters.values())).device_mesh
        groups = self._exchange.groups
        self._place = ShardPlace(mesh, groups.parent, _rank_table(mesh, self._exchange), self._exchange.rank)
        self._units: list[ShardUnit] = []
        self._unit_of: dict[int, ShardUnit] = {}
        self._sent: list[ShardUnit] = []
        self._in_pass = self._reset_queued = False
        self._handles: list[Any] = []
        if self._exchange.world > 1:
            with torch.no_grad():
                groups.broadcast([local_shard(p) for p in parameters.values()])
            self._build_units(model)
            _open.add(self)
        inner, handles = self._exchange, self._handles  # not `self`, which could then never be collected
        close_when_collected(self, lambda: _close(inner, handles, reuse_groups=False))

    @property
    def step(self) -> int:
        """The number of backward passes that were exchanged."""
        return self._exchange.step

    def __repr__(self) -> str:
        exchange = self._exchange
        return (
            f"<syncline.fsdp: {len(self._units)} units over {exchange.world} replicas, codec {exchange.codec.text},"
            f" exchange {exchange.pattern}, step {self.step}>"
        )

    def state_dict(self) -> dict[str, Any]:
        """The codec state for `torch.distributed.checkpoint.save`, on any number of ranks; `load` reads it."""
        states = {name: state for unit in self._units for name, state in unit.states().items()}
        return saved_state(states, self.step, self._parameters, self._place)

    def load(self, checkpoint: str | Path | StorageReader, *, prefix: str = "") -> None:
        """Continue from a checkpoint of `torch.distributed.checkpoint` that holds `state_dict()`.

        With as many shards and replicas as saved, training continues bit for bit. With another number of replicas each
        one gets the mean of the residuals, and with another number of shards each one gets its rows; factors that
        belong to a shard then start from the beginning. A single replica exchanges nothing, and has no residuals.

        Args:
            checkpoint: The folder, or a storage reader.
            prefix: The key under which the state was saved, such as `"codec"` for `{"codec": sync.state_dict()}`.
        """
        reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
        self._exchange.step, states = read_saved_state(reader, prefix, self._parameters, self._place)
        for unit in self._units:
            unit.load(states)

    def close(self) -> None:
        """End all threads and remove all hooks; the model then trains without the other replicas."""
        _open.discard(self)
        _close(self._exchange, self._handles, reuse_groups=True)

    def _build_units(self, model: nn.Module) -> None:
        names = {id(p): name for name, p in self._parameters.items()}
        taken: set[int] = set()
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        for name, module in reversed(modules):  # children first: a parent owns what no child has
            mine = [p for p in module.parameters() if id(p) not in taken and _can_train(p)]
            taken |= {id(p) for p in module.parameters()}
            if mine:
                unit = ShardUnit(name or "root", module, {names[id(p)]: p for p in mine}, self._exchange)
                self._units.insert(0, unit)
        for unit in self._units:
            self._handles.append(unit.module.register_forward_pre_hook(unit.note_forward, with_kwargs=True))
            for p in unit.parameters.values():
                self._unit_of[id(p)] = unit
                self._handles.append(_hook_gradient(p, self._gradient_ready))
        self._handles.append(model.register_forward_hook(self._watch_outputs))

    def _gradient_ready(self, parameter: Tensor) -> None:
        """FSDP2 has reduce-scattered a gradient, on the current stream."""
        unit = self._unit_of[id(parameter)]
        self._reset_after_backward()
        if not fsdp_requires_all_reduce(unit.module):
            return
        if (factor := fsdp_divide_factor(unit.module)) is not None:
            raise UsageError(
                f"set_gradient_divide_factor({factor:g}) divides a sum over all replicas, and {_CALLER} averages over"
                " them: leave it out, and scale the loss"
            )
        if not self._in_pass:
            self._in_pass = True
            self._exchange.begin(local_shard(parameter).device)
            after_backward(self._end_pass)
        # A module that was used twice adds to its gradient a second time: it is sent at the end.
        if unit.fire(parameter) and unit.forwards < 2:
            self._launch(unit)

    def _launch(self, unit: ShardUnit) -> None:
        unit.launch()
        self._sent.append(unit)

    def _end_pass(self) -> None:
        """The backward pass has ended: send what is left, in one order on all ranks, and wait for everything."""
        try:
            for unit in self._units:
                if unit.fired and unit not in self._sent:
                    self._launch(unit)
            for unit in self._sent:
                unit.wait()
            for unit in self._sent:
                unit.commit()
            self._exchange.step += 1
        finally:
            self._in_pass, self._sent = False, []
            for unit in self._units:
                unit.fired.clear()

    def _watch_outputs(self, model: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_began)

    def _backward_began(self, gradient: Tensor) -> None:
        self._reset_after_backward()

    def _reset_after_backward(self) -> None:
        if not self._reset_queued:
            self._reset_queued = True
            after_backward(self._reset)

    def _reset(self) -> None:
        self._reset_queued = False
        for unit in self._units:
            unit.forwards = 0


def _close(exchange: BucketExchange, handles: list[Any], *, reuse_groups: bool) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
    exchange.close(reuse_groups=reuse_groups)


def _can_train(parameter: Tensor) -> bool:
    """Whether this rank has a part of a parameter that is trained, or frozen and may be trained later."""
    return local_shard(parameter).numel() > 0 and parameter.is_floating_point()


def _hook_gradient(parameter: nn.Parameter, hook: Any) -> Any:
    """Register a hook for new gradients; torch refuses one on a parameter that is frozen now."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trained)


def _checked_parameters(model: nn.Module) -> dict[str, Any]:
    """The parameters by name; an error if FSDP2 does not shard them over one dimension of the mesh."""
    if not isinstance(model, FSDPModule):
        raise UsageError(
            f"{_CALLER} needs a model that FSDP2 shards: call fully_shard(model, mesh=mesh['shard']) first, or use"
            " syncline.attach for a model that is not sharded"
        )
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if not isinstance(p, DTensor):
            raise UsageError(
                f"'{name}' is not sharded, so nobody would average its gradient: give it to fully_shard too"
            )
        if any(isinstance(placement, Replicate) for placement in p.placements):
            raise UsageError(
                f"'{name}' is on a mesh with replicas, and torch averages its gradient itself: call"
                " fully_shard(..., mesh=mesh['shard']) with the dimension of the shards alone"
            )
    return parameters


def _rank_table(mesh: DeviceMesh, exchange: BucketExchange) -> Tensor:
    """The ranks of all shards (columns) of all replicas (rows); an error if replicas and shards do not fit."""
    mine = mesh.mesh.flatten().to("cpu", torch.int64)
    if exchange.world == 1:
        return mine.view(1, -1)
    sizes = exchange.groups.gather(torch.tensor([mine.numel(), mesh.get_local_rank()]))
    if not torch.equal(sizes, sizes[:1].expand_as(sizes)):
        raise UsageError(
            "the ranks of replicate= do not hold the same shard: give the other dimension of the mesh, as in"
            " fully_shard(model, mesh=mesh['shard']) and replicate=mesh['replicate']"
        )
    table = exchange.groups.gather(mine)
    if len(set(table.flatten().tolist())) != table.numel():
        raise UsageError("the ranks of replicate= share one shard group: give the other dimension, mesh['replicate']")
    return table


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [t for part in value for t in _tensors_in(part)] if isinstance(value, tuple | list) else []
