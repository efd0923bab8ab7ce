"""The forward pass alone, for evaluation: micro-batches go from stage to stage, under any schedule of training."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from syncline.pipeline.blocks import Values, as_values
from syncline.pipeline.layout import Layout
from syncline.pipeline.mesh import Mesh, message_device
from syncline.pipeline.stage import StageModule


def run_forward(
    modules: Mapping[int, StageModule], layout: Layout, mesh: Mesh, *, micro_batches: int, device: torch.device
) -> list[Any]:
    """The outputs of all micro-batches on the rank that runs the last stage; nothing on the others.

    `modules` are this rank's stages. The shapes of the values are the same for all micro-batches, and are sent once.
    """
    outputs: list[Any] = []
    here, last = mesh.position, len(layout.stages) - 1
    local: dict[int, Values] = {}
    shapes: dict[int, list[tuple[torch.Size, torch.dtype]]] = {}
    for micro in range(micro_batches):
        for stage in sorted(modules):
            if stage == 0:
                values: Values = (torch.tensor(micro),)
            elif stage in local:
                values = local.pop(stage)
            else:
                values = _receive(layout.position(stage - 1), shapes, stage, mesh, device)
            out = modules[stage](*values)
            if stage == last:
                outputs.append(out)
            elif (target := layout.position(stage + 1)) == here:
                local[stage + 1] = as_values(out)
            else:
                _send(as_values(out), target, mesh, device, describe=micro == 0)
    return outputs


def _send(values: Values, target: int, mesh: Mesh, device: torch.device, *, describe: bool) -> None:
    if describe:
        about = [[(value.shape, value.dtype) for value in values]]
        dist.send_object_list(about, group=mesh.pipe, group_dst=target, device=message_device(device, mesh.pipe))
    for value in values:
        dist.send(value, group=mesh.pipe, group_dst=target)


def _receive(
    source: int, shapes: dict[int, list[tuple[torch.Size, torch.dtype]]], stage: int, mesh: Mesh, device: torch.device
) -> Values:
    if stage not in shapes:
        about: list[Any] = [None]
        dist.recv_object_list(about, group=mesh.pipe, group_src=source, device=message_device(device, mesh.pipe))
        shapes[stage] = about[0]
    values = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes[stage])
    for value in values:
        dist.recv(value, group=mesh.pipe, group_src=source)
    return values
