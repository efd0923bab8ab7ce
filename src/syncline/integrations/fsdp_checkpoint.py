"""Codec state of FSDP2 shards in `torch.distributed.checkpoint`, also for another number of shards and replicas.

Residuals are DTensors of the parameter's shape with one more dimension in front, the replicas. Other codec state
(PowerSGD's factors) belongs to a shard: plain tensors with the shard's and the replica's number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from syncline.errors import UsageError
from syncline.integrations.fsdp_units import States, local_shard

_STEP, _REPLICAS = "step", "replicas"
_ERROR = "error"
"""The key of a residual in a codec's state: the only state that has the shape of the gradient."""
_OF_A_SHARD = re.compile(r"(.+)\.([^.]+)\.shard(\d+)\.replica(\d+)", re.ASCII)


@dataclass(frozen=True)
class ShardPlace:
    """Where this rank's shards are: the mesh of the shards, the group of the replicas, and all ranks as a table."""

    mesh: DeviceMesh
    replicate: dist.ProcessGroup
    ranks: Tensor
    """Ranks of all shards (columns) of all replicas (rows)."""
    replica: int

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.ranks)

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.mesh.get_local_rank()


def saved_state(states: States, step: int, parameters: Mapping[str, DTensor], place: ShardPlace) -> dict[str, Any]:
    """What `torch.distributed.checkpoint.save` gets."""
    saved: dict[str, Any] = {_STEP: torch.tensor(step), _REPLICAS: torch.tensor(place.replicas)}
    if not states:
        return saved
    groups = [place.replicate, place.mesh.get_group()]
    mesh = DeviceMesh.from_group(
        groups, place.mesh.device_type, mesh=place.ranks, mesh_dim_names=("replicate", "shard")
    )  # fmt: skip
    for name, tensors in states.items():
        for key, tensor in tensors.items():
            if key == _ERROR:
                local = tensor.detach().clone().view(1, *local_shard(parameters[name]).shape)
                saved[f"{name}.{key}"] = _stacked(local, parameters[name], mesh, place.replicas)
            else:
                saved[f"{name}.{key}.shard{place.shard}.replica{place.replica}"] = tensor.detach().clone()
    return saved


def read_saved_state(
    reader: StorageReader, prefix: str, parameters: Mapping[str, DTensor], place: ShardPlace
) -> tuple[int, States]:
    """The step and this rank's codec state, whatever number of shards and replicas wrote them."""
    before = f"{prefix}." if prefix else ""
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    if f"{before}{_STEP}" not in saved:
        names = ", ".join(sorted({name.split(".")[0] for name in saved})[:5])
        raise UsageError(f"the checkpoint has no codec state under '{prefix}': its names begin with {names}")
    counts = {f"{before}{key}": torch.tensor(0) for key in (_STEP, _REPLICAS)}
    load(counts, storage_reader=reader)
    step, replicas = (int(count) for count in counts.values())
    same_replicas = replicas == place.replicas
    templates: dict[str, Any] = {}
    for name, parameter in parameters.items():
        path = f"{before}{name}.{_ERROR}"
        if path in saved:
            local = local_shard(parameter)
            empty = torch.zeros(replicas, *local.shape, dtype=saved[path].properties.dtype, device=local.device)
            templates[path] = _stacked(empty, parameter, place.mesh, replicas)
    of_a_shard = {
        path: found
        for path in saved
        if path.startswith(before) and (found := _OF_A_SHARD.fullmatch(path.removeprefix(before)))
    }
    same_shards = len({found[3] for found in of_a_shard.values()}) == place.mesh.size()
    for path, found in of_a_shard.items():
        mine = (int(found[3]), int(found[4])) == (place.shard, place.replica)
        if mine and same_shards and same_replicas and found[1] in parameters:
            row = saved[path]
            templates[path] = torch.zeros(row.size, dtype=row.properties.dtype, device=place.mesh.device_type)
    load(templates, storage_reader=reader)
    states: States = {}
    for path, tensor in templates.items():
        if path in of_a_shard:
            states.setdefault(of_a_shard[path][1], {})[of_a_shard[path][2]] = tensor
        else:
            each = local_shard(tensor)
            name = path.removeprefix(before).removesuffix(f".{_ERROR}")
            states.setdefault(name, {})[_ERROR] = each[place.replica] if same_replicas else each.mean(0)
    return step, states


def _stacked(local: Tensor, parameter: DTensor, mesh: DeviceMesh, replicas: int) -> DTensor:
    """A DTensor with the parameter's shape behind a dimension of replicas, from this rank's part of it."""
    shape = torch.Size((replicas, *parameter.shape))
    places: list[Placement] = [Shard(0)] if mesh.ndim == 2 else []
    for placement in parameter.placements:
        places.append(Shard(placement.dim + 1) if isinstance(placement, Shard) else placement)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, places, run_check=False, shape=shape, stride=stride)
