"""Freeze policies: functions that say how many of a model's first blocks stop training after each epoch.

When a pretrained transformer is fine-tuned, the blocks near the input stop changing first (PipeTransformer, Egeria).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from syncline.errors import UsageError
from syncline.registry import Registry


@dataclass(frozen=True)
class Progress:
    """What a policy decides from: epochs done, number of blocks, blocks frozen so far, and measurements.

    `norms`: the gradient norm of each block, None if no gradient was measured. `changes`: for each epoch so far, how
    much the activations of each block have changed in it; the first epoch has no entry.
    """

    epoch: int
    blocks: int
    frozen: int
    norms: Sequence[float] | None = None
    changes: Sequence[Sequence[float]] = ()


FREEZE_POLICIES: Registry[Callable[..., int]] = Registry("freeze policy")
_NEEDS: dict[Callable[..., int], tuple[str, ...]] = {}
Policy = TypeVar("Policy", bound=Callable[..., int])


def policy(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[Policy], Policy]:
    """Decorator: register a freeze policy; `needs` names the measurements that it reads, `norms` or `changes`."""

    def add(function: Policy) -> Policy:
        _NEEDS[function] = needs
        FREEZE_POLICIES.register(name)(function)
        return function

    return add


def needs_of(name: str) -> tuple[str, ...]:
    """The measurements that a policy reads. A user's function reads gradient norms, or what its `needs` says."""
    function = FREEZE_POLICIES.get(name)
    return _NEEDS.get(function) or tuple(getattr(function, "needs", () if function in _NEEDS else ("norms",)))


@policy("none")
def none(progress: Progress) -> int:
    """Freeze nothing."""
    return 0


@policy("schedule")
def schedule(progress: Progress, *, alpha: float = 1 / 3, after: int = 0, keep: int = 0) -> int:
    """Freeze the share `alpha` of the remaining blocks after each epoch: ceil(L * (1 - (1 - alpha)^epoch)) in total.

    The first `after` epochs do not count: all blocks adapt to the new task while the learning rate is high. The last
    `keep` blocks never freeze.
    """
    if not 0 <= alpha < 1:
        raise UsageError(f"alpha is {alpha:g}: use a number from 0 up to, but not including, 1")
    if after < 0 or keep < 0:
        raise UsageError(f"{after=} and {keep=}: use 0 or more epochs and blocks")
    # Rounded first: 12 * (1 - 0.75) must be 3, not the next number above it.
    frozen = math.ceil(round(progress.blocks * (1 - (1 - alpha) ** max(0, progress.epoch - after)), 9))
    return max(0, min(frozen, progress.blocks - keep))


@policy("gradnorm", needs=("norms",))
def gradnorm(progress: Progress, *, alpha: float = 1 / 3, after: int = 0, keep: int = 0) -> int:
    """Freeze up to the block with the smallest gradient norm, but never more blocks than `schedule` does."""
    bound = schedule(progress, alpha=alpha, after=after, keep=keep)
    if progress.norms is None:
        return progress.frozen
    norms = progress.norms
    training = range(progress.frozen, progress.blocks)
    smallest = min(training, key=lambda block: norms[block], default=progress.blocks)
    return min(smallest, bound)


@policy("plasticity", needs=("changes",))
def plasticity(progress: Progress, *, tolerance: float = 0.2, patience: int = 2) -> int:
    """Freeze the first blocks whose activations have stopped changing, as in Egeria.

    A block has stopped when its change was at most `tolerance` times its largest change so far, in each of the last
    `patience` epochs.
    """
    if not 0 <= tolerance < 1 or patience < 1:
        raise UsageError(f"plasticity({tolerance=:g}, {patience=}): tolerance is from 0 to below 1, patience 1 or more")
    if len(progress.changes) <= patience:
        return progress.frozen

    def stopped(block: int) -> bool:
        series = [epoch[block] for epoch in progress.changes]
        return block < progress.frozen or max(series[-patience:]) <= tolerance * max(series)

    return next((block for block in range(progress.blocks) if not stopped(block)), progress.blocks)
