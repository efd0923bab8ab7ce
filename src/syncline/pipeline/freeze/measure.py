"""Measurements for freeze policies: gradient norms of blocks, and the change of their activations on a probe batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from syncline.pipeline.blocks import Blocks

PROBE = 16
"""Samples of the probe batch."""


def gradient_norms(blocks: Blocks) -> list[float]:
    """The norm of each block's gradient, 0 where it has none; with `syncline.attach`, of the averaged gradient."""
    return [
        math.hypot(*(float(torch.linalg.vector_norm(p.grad)) for p in blocks.parameters(block) if p.grad is not None))
        for block in range(len(blocks))
    ]


@dataclass
class GradientNorms:
    """The mean square of gradient norms over the steps of an epoch.

    Squares and not norms: stages of a block on several ranks then add up to the block's.
    """

    squares: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, norms: Sequence[float]) -> None:
        """One more step."""
        before = self.squares or [0.0] * len(norms)
        self.squares = [total + norm * norm for total, norm in zip(before, norms, strict=True)]
        self.count += 1

    def take(self) -> list[float] | None:
        """The mean squares of the steps so far, and start again; None without steps."""
        squares, count = self.squares, self.count
        self.squares, self.count = [], 0
        return [total / count for total in squares] if count else None


def similarities(outputs: Sequence[Tensor]) -> list[Tensor]:
    """For each block the similarity of every pair of samples: A A^T of its flat outputs A, with rows of length 1."""
    found = []
    for output in outputs:
        flat = output.detach().flatten(1).float()
        found.append(torch.nn.functional.normalize(flat @ flat.T, dim=1).double().cpu())
    return found


def change(now: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Egeria's plasticity of each block: the mean squared difference of similarities (Tung and Mori)."""
    return [float((a - b).square().mean()) for a, b in zip(now, reference, strict=True)]


class ActivationProbe:
    """Runs the model on the same few samples at the end of every epoch and compares the outputs of its blocks.

    The samples are those of the first training step of this rank. The reference is the model of the epoch before.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._last = [_last_module(blocks, block) for block in range(len(blocks))]
        self.inputs: list[Any] = []
        self.reference: list[Tensor] = []

    def offer(self, args: Sequence[Any]) -> None:
        """Keep the first samples of a batch, once."""
        if not self.inputs:
            self.inputs = [a[:PROBE].detach().clone() if isinstance(a, Tensor) and a.dim() else a for a in args]

    @torch.no_grad()
    def compare(self) -> list[float] | None:
        """The change of each block since the last call; None at the first."""
        if not self.inputs:
            return None
        outputs: dict[int, Tensor] = {}
        model, hooks = self._blocks.model, []
        modes = [(module, module.training) for module in model.modules()]
        for block, module in enumerate(self._last):

            def keep(_: nn.Module, args: Any, output: Any, block: int = block) -> None:
                outputs[block] = output[0] if isinstance(output, tuple | list) else output

            hooks.append(module.register_forward_hook(keep))
        model.eval()
        try:
            model(*self.inputs)
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes:
                module.training = mode
        now = similarities([outputs[block] for block in range(len(self._last))])
        before, self.reference = self.reference, now
        return change(now, before) if before else None


def _last_module(blocks: Blocks, block: int) -> nn.Module:
    """The largest module of the model whose parameters are all of this block, and which holds its last sublayer's.

    A part of a split model is not called by the model's own forward pass; the module that it was made of is.
    """
    mine = {id(p) for p in blocks.parameters(block)}
    last = {id(p) for p in blocks.members[block][-1].parameters()}
    for module in blocks.model.modules():  # outer modules come first
        held = {id(p) for p in module.parameters()}
        if held and last <= held <= mine:
            return module
    return blocks.members[block][-1]
