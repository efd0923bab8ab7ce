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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from syncline._compat import after_backward, fsdp_requires_all_reduce, in_backward
from syncline.engine.launch.units import Slot, UnitRun, gather_states
from syncline.engine.process_groups import GroupLike
from syncline.engine.shutdown import close_when_collected
from syncline.errors import UsageError
from syncline.integrations.buckets import BucketExchange
from syncline.plan import Unit

_CALLER = "syncline.fsdp.attach"
_STEP = "step"
_REPLICAS = "replicas"
_ERROR = "error"
"""The key of a residual in a codec's state: the only state that has the shape of the gradient."""


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
        self._exchange = BucketExchange(spec, pattern=exchange, process_group=replicate, seed=seed, caller=_CALLER)
        self._parameters = parameters
        self._mesh: DeviceMesh = next(iter(parameters.values())).device_mesh
        self._replicas = _rank_table(self._mesh, self._exchange)
        self._units: list[_ShardUnit] = []
        self._unit_of: dict[int, _ShardUnit] = {}
        self._sent: list[_ShardUnit] = []
        self._in_pass = self._reset_queued = False
        self._handles: list[Any] = []
        if self._exchange.world > 1:
            with torch.no_grad():
                self._exchange.groups.broadcast([_local(p) for p in parameters.values()])
            self._build_units(model)
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
        """The codec state for `torch.distributed.checkpoint.save`, on any number of ranks; `load` reads it.

        Residuals are DTensors of the parameter's shape with one more dimension in front, the replicas. Other codec
        state (PowerSGD's factors) belongs to a shard: plain tensors with the shard's and the replica's number.
        """
        state: dict[str, Any] = {_STEP: torch.tensor(self.step), _REPLICAS: torch.tensor(self._exchange.world)}
        if not self._units:
            return state
        replica, shard = self._exchange.rank, self._mesh.get_local_rank()
        mesh = _two_dimensions(self._mesh, self._exchange.groups.parent, self._replicas)
        shapes = {slot.name: slot.shape for unit in self._units for slot in unit.run.slots}
        for name, tensors in gather_states((unit.run for unit in self._units), shapes).items():
            for key, tensor in tensors.items():
                if key == _ERROR:
                    local = tensor.detach().clone().view(1, *shapes[name])
                    state[f"{name}.{key}"] = _stacked(local, self._parameters[name], mesh, self._exchange.world)
                else:
                    state[f"{name}.{key}.shard{shard}.replica{replica}"] = tensor.detach().clone()
        return state

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
        before = f"{prefix}." if prefix else ""
        saved = reader.read_metadata().state_dict_metadata
        if f"{before}{_STEP}" not in saved:
            names = ", ".join(sorted({name.split(".")[0] for name in saved})[:5])
            raise UsageError(f"the checkpoint has no codec state under '{prefix}': its names begin with {names}")
        counts = {f"{before}{key}": torch.tensor(0) for key in (_STEP, _REPLICAS)}
        load(counts, storage_reader=reader)
        self._exchange.step, replicas = int(counts[f"{before}{_STEP}"]), int(counts[f"{before}{_REPLICAS}"])
        wanted = self._templates(saved, before, replicas)
        load(wanted, storage_reader=reader)
        states: dict[str, dict[str, Tensor]] = {}
        same = replicas == self._exchange.world
        for name in self._parameters:
            for path, tensor in wanted.items():
                if not path.startswith(f"{before}{name}."):
                    continue
                key = path.removeprefix(f"{before}{name}.").split(".")[0]
                if key == _ERROR:
                    each = _local(tensor)
                    states.setdefault(name, {})[key] = each[self._exchange.rank] if same else each.mean(0)
                elif same:
                    states.setdefault(name, {})[key] = tensor
        for unit in self._units:
            for launch in unit.run.launches:
                for batch in launch.batches:
                    batch.load(states)

    def close(self) -> None:
        """End all threads and remove all hooks; the model then trains without the other replicas."""
        _close(self._exchange, self._handles, reuse_groups=True)

    def _build_units(self, model: nn.Module) -> None:
        names = {id(p): name for name, p in self._parameters.items()}
        taken: set[int] = set()
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        units: list[_ShardUnit] = []
        for name, module in reversed(modules):  # children first: a parent owns what no child has
            mine = [p for p in module.parameters() if id(p) not in taken and _local(p).numel()]
            taken |= {id(p) for p in module.parameters()}
            if mine:
                units.append(_ShardUnit(name or "root", module, {names[id(p)]: p for p in mine}, self._exchange))
        self._units = units[::-1]
        for unit in self._units:
            self._handles.append(unit.module.register_forward_pre_hook(unit.note_forward, with_kwargs=True))
            for p in unit.parameters.values():
                self._unit_of[id(p)] = unit
                self._handles.append(p.register_post_accumulate_grad_hook(self._gradient_ready))
        self._handles.append(model.register_forward_hook(self._watch_outputs))

    def _gradient_ready(self, parameter: Tensor) -> None:
        """FSDP2 has reduce-scattered a gradient, on the current stream."""
        unit = self._unit_of[id(parameter)]
        self._reset_after_backward()
        if not fsdp_requires_all_reduce(unit.module):
            return
        if not self._in_pass:
            self._in_pass = True
            self._exchange.begin(_local(parameter).device)
            after_backward(self._end_pass)
        # A module that was used twice adds to its gradient a second time: it is sent at the end.
        if unit.fire(parameter) and unit.forwards < 2:
            self._launch(unit)

    def _launch(self, unit: "_ShardUnit") -> None:
        unit.prepare()
        self._exchange.launch(unit.run)
        self._sent.append(unit)

    def _end_pass(self) -> None:
        """The backward pass has ended: send what is left, in one order on all ranks, and wait for everything."""
        try:
            for unit in self._units:
                if unit.fired and unit not in self._sent:
                    self._launch(unit)
            for unit in self._sent:
                self._exchange.wait(unit.run)
            for unit in self._sent:
                unit.finish()
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

    def _templates(self, saved: Mapping[str, Any], before: str, replicas: int) -> dict[str, Any]:
        """Tensors to load into: the residuals of all replicas for this rank's rows, and this shard's other state."""
        templates: dict[str, Any] = {}
        mine = f".shard{self._mesh.get_local_rank()}.replica{self._exchange.rank}"
        shards = {
            path.split(".shard")[1].split(".")[0] for path in saved if path.startswith(before) and ".shard" in path
        }
        same_shards = len(shards) == self._mesh.size()
        for name, parameter in self._parameters.items():
            path = f"{before}{name}.{_ERROR}"
            if path in saved:
                local = _local(parameter)
                empty = torch.zeros(replicas, *local.shape, dtype=saved[path].properties.dtype, device=local.device)
                templates[path] = _stacked(empty, parameter, self._mesh, replicas)
        if same_shards:
            for path in saved:
                if path.startswith(before) and path.endswith(mine):
                    shape, dtype = saved[path].size, saved[path].properties.dtype
                    templates[path] = torch.zeros(shape, dtype=dtype, device=self._mesh.device_type)
        return templates


class _ShardUnit:
    """The parameters of one `fully_shard` call: this rank's shards of them, and their progress in a pass."""

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter], exchange: BucketExchange
    ) -> None:
        self.module, self.parameters = module, dict(parameters)
        slots = [
            Slot(path, _local(p), number, _local(p))  # type: ignore[arg-type]
            for number, (path, p) in enumerate(self.parameters.items())
        ]
        row = Unit(name, tuple(self.parameters), exchange.codec.text, exchange.pattern)
        self.run = UnitRun(row, slots, exchange.links)
        for launch in self.run.launches:
            exchange.open(launch.rounds)
        self.fired: set[int] = set()
        """The parameters that have a new gradient in this pass, by `id`."""
        self.forwards = 0
        """How often the module ran forward since the last backward pass."""

    def note_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.forwards += 1

    def fire(self, parameter: Tensor) -> bool:
        """Note a new gradient; returns whether all are there."""
        self.fired.add(id(parameter))
        return len(self.fired) == sum(p.requires_grad for p in self.parameters.values())

    def prepare(self) -> None:
        """Point the unit at the gradients; a parameter without one sends zeros and keeps `grad` None."""
        run = self.run
        run.begin()
        grads = [None if p.grad is None else _local(p.grad) for p in self.parameters.values()]
        run.grads = [
            torch.zeros_like(_local(p)) if g is None else g
            for p, g in zip(self.parameters.values(), grads, strict=True)
        ]
        run.targets = list(grads)
        run.takes_memory = [False] * len(grads)

    def finish(self) -> None:
        """The gradients are averaged: keep the codec states that the exchange left."""
        for launch in self.run.launches:
            launch.commit()


def _close(exchange: BucketExchange, handles: list[Any], *, reuse_groups: bool) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
    exchange.close(reuse_groups=reuse_groups)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard, without autograd."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


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


def _two_dimensions(shard: DeviceMesh, replicate: dist.ProcessGroup, ranks: Tensor) -> DeviceMesh:
    """The mesh (replicas, shards) over the groups that exist."""
    groups = [replicate, shard.get_group()]
    return DeviceMesh.from_group(groups, shard.device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _stacked(local: Tensor, parameter: DTensor, mesh: DeviceMesh, replicas: int) -> DTensor:
    """A DTensor with the parameter's shape behind a dimension of replicas, from this rank's part of it."""
    shape = torch.Size((replicas, *parameter.shape))
    places: list[Placement] = [Shard(0)] if mesh.ndim == 2 else []
    for placement in parameter.placements:
        places.append(Shard(placement.dim + 1) if isinstance(placement, Shard) else placement)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, places, run_check=False, shape=shape, stride=stride)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [t for part in value for t in _tensors_in(part)] if isinstance(value, tuple | list) else []
