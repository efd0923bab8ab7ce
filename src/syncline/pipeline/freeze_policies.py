"""Freeze policies: how many of a model's first blocks stop training after each epoch, and `Freezer`, which applies one.

When a pretrained transformer is fine-tuned, the blocks near the input stop changing first (PipeTransformer). A policy
is a function of `Progress` that returns the number of blocks to freeze, counted from the input.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncline import spec
from syncline.errors import UsageError
from syncline.registry import Registry


@dataclass(frozen=True)
class Progress:
    """What a policy decides from: epochs done, number of blocks, blocks frozen so far, gradient norm of each block."""

    epoch: int
    blocks: int
    frozen: int
    norms: Sequence[float] | None = None


FREEZE_POLICIES: Registry[Callable[..., int]] = Registry("freeze policy")


@FREEZE_POLICIES.register("none")
def none(progress: Progress) -> int:
    """Freeze nothing."""
    return 0


@FREEZE_POLICIES.register("schedule")
def schedule(progress: Progress, *, alpha: float = 1 / 3) -> int:
    """Freeze the share `alpha` of the remaining blocks after each epoch: ceil(L * (1 - (1 - alpha)^epoch)) in total."""
    if not 0 <= alpha < 1:
        raise UsageError(f"alpha is {alpha:g}: use a number from 0 up to, but not including, 1")
    # Rounded first: 12 * (1 - 0.75) must be 3, not the next number above it.
    return math.ceil(round(progress.blocks * (1 - (1 - alpha) ** progress.epoch), 9))


@FREEZE_POLICIES.register("gradnorm")
def gradnorm(progress: Progress, *, alpha: float = 1 / 3) -> int:
    """Freeze up to the block with the smallest gradient norm, but never more blocks than `schedule(alpha)` does."""
    if progress.norms is None:
        raise UsageError(
            "the policy gradnorm needs gradients: call end_epoch(norms=gradient_norms(blocks)) before zero_grad"
        )
    training = range(progress.frozen, progress.blocks)
    smallest = min(training, key=lambda block: progress.norms[block], default=progress.blocks)  # type: ignore[index]
    return min(smallest, schedule(progress, alpha=alpha))


def gradient_norms(blocks: Sequence[nn.Module]) -> list[float]:
    """The norm of each block's gradient, 0 where it has none; with `syncline.attach`, of the averaged gradient."""
    return [
        math.hypot(*(float(torch.linalg.vector_norm(p.grad)) for p in block.parameters() if p.grad is not None))
        for block in blocks
    ]


class Freezer:
    """Freezes the first blocks of a model as a policy says. Works with `syncline.attach` and without.

    It sets `requires_grad` and nothing else: the optimizer keeps its parameter groups and skips parameters without a
    gradient. An attached engine drops frozen parameters from backward, network and plan at the next step. `before` are
    modules in front of the first block (an embedding); they freeze together with it. Call `end_epoch` on every rank.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], policy: str = "schedule", *, before: Sequence[nn.Module] = ()
    ) -> None:
        if not blocks:
            raise UsageError(
                "there are no blocks to freeze: give the model's list of layers, such as model.encoder.layers"
            )
        self._blocks, self._before = list(blocks), list(before)
        self._call = spec.parse_one(policy)
        self._policy = FREEZE_POLICIES.get(self._call.name)
        self.epoch = self.frozen = 0
        self._ask(None)  # wrong options fail here, not after the first epoch

    def end_epoch(self, norms: Sequence[float] | None = None) -> int:
        """Count an epoch and freeze what the policy says; returns the number of frozen blocks. Nothing is unfrozen."""
        self.epoch += 1
        self.frozen = max(self.frozen, min(self._ask(norms), len(self._blocks)))
        self._apply()
        return self.frozen

    def state_dict(self) -> dict[str, int]:
        """The epoch and the number of frozen blocks."""
        return {"epoch": self.epoch, "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a `state_dict`: freezes the same blocks again, and unfreezes the others."""
        self.epoch, self.frozen = int(state["epoch"]), int(state["frozen"])
        self._apply()

    def _ask(self, norms: Sequence[float] | None) -> int:
        known: Any = [0.0] * len(self._blocks) if norms is None and not self.epoch else norms
        return int(spec.apply(self._call, self._policy, Progress(self.epoch, len(self._blocks), self.frozen, known)))

    def _apply(self) -> None:
        for number, block in enumerate(self._blocks):
            block.requires_grad_(number >= self.frozen)
        for module in self._before:
            module.requires_grad_(not self.frozen)
