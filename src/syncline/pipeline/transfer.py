"""Move parameters, buffers, optimizer and codec state between ranks when the layout of a pipeline changes."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.errors import PeerError
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.layout import Layout, holders, tensors_of
from syncline.pipeline.mesh import Mesh, message_device

_VALUE = "value"


def moves(blocks: Blocks, old: Layout, new: Layout, replica: int) -> list[tuple[int, int, list[str]]]:
    """(from, to, names of tensors) between the positions of one old replica; each holds the whole model together.

    Data never crosses to another old replica, so all replicas move at the same time, over links of their own. Tied
    weights come from their last holder, which has their codec state; a new last holder gets that, too.
    """
    had, needed = holders(blocks, old), holders(blocks, new)
    table: dict[tuple[int, int], list[str]] = {}
    for position in range(old.shape.stages):
        place = new.shape.place(old.shape.rank(replica, position))[1]
        for name in had:
            owner = had[name][-1]
            becomes_owner = needed[name][-1] == place and position != owner
            if place in needed[name] and (position not in had[name] or becomes_owner):
                table.setdefault((owner, position), []).append(name)
    return [(source, target, names) for (source, target), names in sorted(table.items())]


def move_state(
    blocks: Blocks,
    optimizer: torch.optim.Optimizer,
    codec_state: Mapping[str, Tensor],
    old: Layout,
    new: Layout,
    mesh: Mesh,
    *,
    shapes: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """Bring every rank what it needs in the new layout, and free what it does not; returns its new codec state.

    `mesh` is the old one. Values are copied bit by bit. The mean of the residuals is kept: each old replica's go to
    equally many new ones, and where the numbers do not allow that, residuals are averaged first.
    """
    if new.shape.replicas % old.shape.replicas:
        codec_state = _averaged(codec_state, mesh.data)
    tensors = tensors_of(blocks)
    packs = {
        name: _pack(tensor, optimizer, codec_state, name)
        for name, tensor in tensors.items()
        if tensor.shape == shapes[name]
    }
    table = moves(blocks, old, new, mesh.replica)
    if table:
        abouts: list[Any] = [None] * old.shape.stages
        dist.all_gather_object(abouts, {name: about for name, (about, _) in packs.items()}, group=mesh.pipe)
        received = _exchange(table, packs, abouts, mesh, like=next(iter(tensors.values())))
    else:
        received = {}
    kept = _needed_here(blocks, new)
    codec = {path: t for path, t in codec_state.items() if _owner_of(path, kept)}
    for name, (about, parts) in received.items():
        codec.update(_unpack(tensors[name], optimizer, name, about, parts))
    drop_others(blocks, optimizer, new)
    return codec


def collect_state(
    blocks: Blocks, optimizer: torch.optim.Optimizer, layout: Layout, mesh: Mesh, *, shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """The model and the optimizer as one process would save them, on rank 0; ranks of other replicas do nothing."""
    if mesh.replica:
        return {}
    tensors = tensors_of(blocks)
    packs = {n: _pack(t, optimizer, {}, n) for n, t in tensors.items() if t.shape == shapes[n]}
    abouts: list[Any] = [None] * layout.shape.stages
    dist.all_gather_object(abouts, {name: about for name, (about, _) in packs.items()}, group=mesh.pipe)
    table: dict[int, list[str]] = {}
    for name, where in holders(blocks, layout).items():
        if where and 0 not in where:
            table.setdefault(where[0], []).append(name)
    rows = [(source, 0, names) for source, names in sorted(table.items())]
    received = _exchange(rows, packs, abouts, mesh, like=next(iter(tensors.values())))
    if mesh.position:
        return {}
    whole = {**packs, **received}
    names = {id(tensor): name for name, tensor in tensors.items()}
    # The names of a single process: all names of a tied weight, and no buffers that are not saved.
    saved_names = {key: names.get(id(t)) for key, t in blocks.model.state_dict(keep_vars=True).items()}
    model = {key: whole[name][1][0].detach().clone() for key, name in saved_names.items() if name is not None}
    saved = optimizer.state_dict()
    numbers = _numbers(blocks, optimizer)
    state = dict(saved["state"])
    for name, number in numbers.items():
        about, (_, *parts) = whole[name]
        if about["has_state"]:
            values = {key: part.clone() for (key, _), part in zip(about["keys"], parts, strict=True)}
            state[number] = {**values, **about["values"]}
    return {"model": model, "optimizer": {**saved, "state": state}}


def put_state(blocks: Blocks, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], layout: Layout) -> None:
    """Take over the part of a collected state that this rank holds, and the settings of the optimizer's groups."""
    tensors, kept = tensors_of(blocks), _needed_here(blocks, layout)
    numbers = _numbers(blocks, optimizer)
    held = {numbers[name] for name in kept if name in numbers}
    known = {number: entry for number, entry in state["optimizer"]["state"].items() if number in held}
    with torch.no_grad():
        for name in sorted(kept & state["model"].keys()):
            tensors[name].copy_(state["model"][name])
    optimizer.load_state_dict({**state["optimizer"], "state": known})


def _numbers(blocks: Blocks, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number of each parameter in the optimizer's own `state_dict`, by name."""
    order = {id(p): at for at, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    return {name: order[id(t)] for name, t in tensors_of(blocks).items() if id(t) in order}


def drop_others(blocks: Blocks, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Free the tensors that this rank does not hold, and their optimizer state; the objects stay."""
    kept = _needed_here(blocks, layout)
    for name, tensor in tensors_of(blocks).items():
        if name not in kept:
            tensor.data = tensor.new_empty(0)
            tensor.grad = None
            optimizer.state.pop(tensor, None)


def compare_replicas(
    blocks: Blocks, optimizer: torch.optim.Optimizer, layout: Layout, group: dist.ProcessGroup, what: str
) -> None:
    """Raise unless all replicas of this rank's stages have the same parameters, buffers and optimizer state."""
    tensors = tensors_of(blocks)
    names = sorted(_needed_here(blocks, layout))
    sums = [checksum([tensors[name], *_state_tensors(optimizer, tensors[name])]) for name in names]
    mine = torch.tensor(sums, device=message_device(tensors[names[0]].device, group))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, row in zip(ranks, rows, strict=True):
        if differ := (row != rows[0]).nonzero().flatten().tolist():
            raise PeerError(
                f"reshape {what}: rank {rank} has other values of '{names[differ[0]]}' or its optimizer state than rank"
                f" {ranks[0]}: start again from the last checkpoint",
                ranks=[rank],
            )


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that depends on every bit of these tensors, in order."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        raw = _bytes(tensor)
        whole = raw.numel() // 8 * 8
        words = raw[:whole].view(torch.int64)
        # Sums that wrap around, of values and of values by position: cheap on any device, and no bit is left out.
        place = torch.arange(1, len(words) + 1, device=raw.device)
        totals = [int(words.sum()), int((words * place).sum()), *raw[whole:].tolist()]
        digest.update(repr((tuple(tensor.shape), str(tensor.dtype), totals)).encode())
    return int.from_bytes(digest.digest(), "big")


# -- messages


def _exchange(
    table: list[tuple[int, int, list[str]]],
    packs: Mapping[str, tuple[Any, list[Tensor]]],
    abouts: list[Any],
    mesh: Mesh,
    like: Tensor,
) -> dict[str, tuple[Any, list[Tensor]]]:
    """Send and receive one message for each pair of positions; returns what came, by name."""
    device = message_device(like.device, mesh.pipe)
    here, works, messages = mesh.position, [], []
    for source, target, names in table:
        if here == source:
            message = torch.cat([_bytes(t).to(device) for name in names for t in packs[name][1]])
            works.append(dist.isend(message, group=mesh.pipe, group_dst=target))
            messages.append((source, names, message, False))
        elif here == target:
            size = sum(_size(shape, dtype) for name in names for shape, dtype in abouts[source][name]["tensors"])
            message = torch.empty(size, dtype=torch.uint8, device=device)
            works.append(dist.irecv(message, group=mesh.pipe, group_src=source))
            messages.append((source, names, message, True))
    for work in works:
        if work is not None:
            work.wait()
    received: dict[str, tuple[Any, list[Tensor]]] = {}
    for source, names, message, came in messages:
        at = 0
        for name in names if came else ():
            about, parts = abouts[source][name], []
            for shape, dtype in about["tensors"]:
                size = _size(shape, dtype)
                part = torch.empty(shape, dtype=dtype, device=device)  # no view: the engine looks for other users
                _bytes(part).copy_(message[at : at + size])
                parts.append(part)
                at += size
            received[name] = (about, parts)
    return received


def _pack(
    tensor: Tensor, optimizer: torch.optim.Optimizer, codec_state: Mapping[str, Tensor], name: str
) -> tuple[dict[str, Any], list[Tensor]]:
    """What belongs to a tensor of the model: a description that can be sent as an object, and the tensors."""
    state = optimizer.state.get(tensor, {})
    keys = sorted(key for key, value in state.items() if isinstance(value, Tensor))
    codec = sorted(path for path in codec_state if _owner_of(path, {name}))
    parts = [tensor.detach(), *(state[key] for key in keys), *(codec_state[path] for path in codec)]
    about = {
        "keys": [(key, state[key].device.type) for key in keys],
        "codec": codec,
        "values": {key: value for key, value in state.items() if key not in keys},
        "tensors": [(tuple(part.shape), part.dtype) for part in parts],
        "has_state": tensor in optimizer.state,
    }
    return about, parts


def _unpack(
    tensor: Tensor, optimizer: torch.optim.Optimizer, name: str, about: dict[str, Any], parts: list[Tensor]
) -> dict[str, Tensor]:
    """Put a received tensor and its optimizer state in place; returns its codec state."""
    value, *rest = parts
    device = tensor.device
    tensor.data = value.to(device)
    if about["has_state"]:
        # Keys in the order in which this optimizer makes them do not matter: state is read by key.
        state = {
            key: part.to(device if kind != "cpu" else "cpu")
            for (key, kind), part in zip(about["keys"], rest, strict=False)
        }
        optimizer.state[tensor] = {**state, **about["values"]}
    return {path: part.to(device) for path, part in zip(about["codec"], rest[len(about["keys"]) :], strict=True)}


def _averaged(codec_state: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    out = dict(codec_state)
    for path in sorted(path for path in codec_state if path.endswith(".error")):
        mean = codec_state[path].clone()
        dist.all_reduce(mean, group=group)
        out[path] = mean / dist.get_world_size(group)
    return out


def _needed_here(blocks: Blocks, layout: Layout) -> set[str]:
    here = layout.shape.place(dist.get_rank())[1]
    return {name for name, where in holders(blocks, layout).items() if here in where}


def _owner_of(path: str, names: set[str]) -> bool:
    return path.rpartition(".")[0] in names


def _state_tensors(optimizer: torch.optim.Optimizer, tensor: Tensor) -> list[Tensor]:
    state = optimizer.state.get(tensor, {})
    return [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]


def _bytes(tensor: Tensor) -> Tensor:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return raw.clone() if raw.storage_offset() % 8 else raw  # so that it can be viewed as any type


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
