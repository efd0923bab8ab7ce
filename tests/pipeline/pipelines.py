"""Small models and reference gradients for the tests of pipelines."""

import torch
from torch import nn

from syncline.pipeline.blocks import Blocks
from syncline.train.workload import build


def workload(spec, *, dtype=torch.float64):
    """(model in double precision, its data): rounding is then far below the tolerance of the comparison."""
    made = build(spec)
    return made.phases[0].module.to(dtype), made.train


def batch_of(data, indices, *, dtype=torch.float64):
    """The samples, with images in double precision."""
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in data.batch(torch.as_tensor(indices)))


def freeze(blocks: Blocks, count: int) -> None:
    """Freeze the embedding and the first blocks, all others train."""
    for p in blocks.model.parameters():
        p.requires_grad_(True)
    for n in range(-1 if count else 0, min(count, len(blocks))):
        for p in blocks.parameters(n):
            p.requires_grad_(False)


def reference(model: nn.Module, batch, frozen: int):
    """(loss, gradients by name) of the whole batch in one process."""
    freeze(Blocks.of(model), frozen)
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
