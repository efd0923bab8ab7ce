"""The strategy interface: how ranks average the gradients of one phase, and how many bytes that sends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.engine.protocols import Freezing
from syncline.errors import UsageError
from syncline.pipeline.freeze import Freezer
from syncline.pipeline.freeze.state import parse as parse_freeze
from syncline.registry import Registry
from syncline.spec import apply, parse_one
from syncline.trace import Recorder

STRATEGIES: Registry[type["Strategy"]] = Registry("strategy")
strategy = STRATEGIES.register
"""Decorator `@strategy(name)`: register a strategy class."""


@dataclass(frozen=True)
class Shrink:
    """How training shrinks while it runs: freeze policy, stages, growing replicas, and the cache's memory per node."""

    freeze: str = ""
    """Empty: nothing freezes."""
    pipe: int = 1
    """Stages at the start; 0: the first steps choose."""
    dp: bool = False
    cache: str = ""
    cache_disk: str = ""
    cache_gpu: str = ""
    samples: int = 0
    """Training samples, for the cache."""
    epochs: int = 1
    """Epochs of the run, for the cache: whether to store what can be read so often."""
    node: int = 0
    """The node of this rank: emulated nodes do not share a cache."""
    example: Callable[[], tuple[Tensor, ...]] | None = None
    """Makes a rank's share of a batch, to measure the stages' layers with."""

    @property
    def needs_pipeline(self) -> bool:
        """Whether training goes through stages, or through a cache in front of one."""
        return self.pipe != 1 or bool(self.cache)


@dataclass(frozen=True)
class Context:
    """A rank among its peers. Workers are ranks 0..workers-1; aggregators, if any, come after them."""

    rank: int
    workers: int
    recorder: Recorder
    group: dist.ProcessGroup | None = None
    """The workers' group; None stands for the default group."""
    shrink: Shrink = Shrink()


@dataclass(frozen=True)
class Traffic:
    """Theoretical bytes of one step on one rank's link. `serial` counts bytes that go both ways at once only once."""

    sent: float
    received: float
    serial: float


class Synchroniser:
    """One phase's module under a strategy: the loop calls it, then `backward`, then `synchronise`.

    This base is training alone: nothing is exchanged.
    """

    optimizer: Optimizer | None = None
    """The optimizer that the loop steps; None for the one that was given to `attach`."""
    warm_up_steps = 2
    """Steps to skip before bytes per step are measured: PowerSGD's hook sends its first two gradients dense."""
    steady_after = 4
    """Steps after which all steps are alike: a benchmark counts from there."""
    freeze: Freezing | None = None
    """Freezes blocks of the module while it trains."""
    pipelined = False
    """Whether no rank holds the whole model: `whole_state` and `load_whole_state` are used for checkpoints."""
    needs_rehearsal = False
    """Whether the first backward pass prepares something (DDP's buckets) that a resumed run must have, too."""

    def __init__(self, module: nn.Module, context: Context) -> None:
        self.module = module
        self.context = context
        self.recorder = context.recorder
        self.parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def part(self) -> tuple[int, int]:
        """The part of every batch that this rank trains on, and the number of parts."""
        return self.context.rank, self.context.workers

    def forward(self, batch: tuple[Tensor, ...], *, samples: Tensor, view: int) -> Tensor:
        """The loss of a batch, recorded; `samples` and `view` are the numbers of its samples and their augmentation."""
        with self.recorder.span("forward"):
            loss: Tensor = self.module(*batch)
        return loss

    def prefetch(self, coming: Callable[[], Tensor], *, view: int) -> None:
        """Read what is kept of the samples of the next batch, whose numbers `coming` gives, beside this step."""

    def notes(self) -> list[str]:
        """Sentences for the results, at the end of the run."""
        return []

    def backward(self, loss: Tensor) -> None:
        """The backward pass, recorded."""
        with self.recorder.span("backward"):
            loss.backward()

    def synchronise(self) -> None:
        """Replace every gradient by its mean over the workers."""

    def synchronise_buffers(self) -> None:
        """Make buffers (BatchNorm statistics) equal on all ranks before an evaluation, if the strategy does so."""

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's own state (error feedback) by flat names, `<parameter>.<key>`, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state from `state_dict`; an empty one resets it."""

    def finish(self) -> None:
        """Return when nothing is in flight: before a checkpoint, before an evaluation and at the end."""

    def evaluate(self, batch: tuple[Tensor, ...]) -> tuple[float, int, float] | None:
        """(right answers, answers, loss summed over samples), if the ranks evaluate a batch together; else None."""
        return None

    def end_epoch(self, test_loss: float | None) -> int | None:
        """Let blocks freeze after an epoch; returns the number of frozen blocks, None if nothing can freeze."""
        if self.freeze is None or parse_freeze(self.context.shrink.freeze).every:  # it counts steps itself
            return None if self.freeze is None else self.freeze.frozen
        return self.freeze.end_epoch(test_loss)

    def follow_freeze(
        self, *, step_s: float, steps_left: int, epochs_left: float, save: Callable[[], Path] | None
    ) -> None:
        """Other blocks may train than before: change what depends on it, between two epochs and after a resume.

        `step_s`: seconds per step in the last epoch; `steps_left` and `epochs_left`: in the rest of the run; `save`
        writes a checkpoint, which comes before anything moves between ranks.
        """

    def whole_state(self) -> dict[str, Any] | None:
        """Model and optimizer state, whole on rank 0, if no rank holds all of it; all ranks call this. Else None."""
        return None

    def load_whole_state(self, state: Mapping[str, Any]) -> None:
        """Load a `whole_state`, which every rank has."""
        raise AssertionError("every rank holds the whole state")

    def synchronised_bytes(self) -> int:
        """Bytes of the gradients that ranks average in a step: those of the parameters that train now."""
        return sum(p.nbytes for _, p in self.parameters if p.requires_grad)

    def close(self) -> None:
        """Release resources; called at the end of the run, also after an error."""

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Every parameter's gradient; an unused parameter's is zero, so that all ranks exchange the same."""
        for _, parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [(name, p.grad) for name, p in self.parameters if p.grad is not None]


class Strategy:
    """A way to synchronise. Subclasses set what differs and register with `@strategy(name)`."""

    synchroniser: Callable[[nn.Module, Context], Synchroniser] = Synchroniser
    alone = False
    """True for training on one rank with the whole batch."""
    servers = 0
    """Dedicated aggregator ranks, started beside the workers."""
    formula = ""
    """Bytes per step on the busiest link, for N workers and S bytes of gradients; empty if unknown."""
    pipelines = False
    """Whether it can train through a pipeline of stages."""
    freezes = False
    """Whether blocks can freeze under this strategy: torch's DDP fails when a parameter stops to train."""
    tuning: tuple[str, ...] = ()
    """Options that change how fast it is, and neither what is sent nor the result."""
    resumable = True
    """False where a checkpoint cannot hold the strategy's state."""

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        """Bind a phase's module, and its optimizer where the strategy needs it, to this strategy on this rank."""
        made = type(self).synchroniser(module, context)
        if context.shrink.freeze:
            given = [] if optimizer is None else [optimizer]
            made.freeze = Freezer(module, context.shrink.freeze, optimizers=given, recorder=context.recorder)
        return made

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        """Theoretical bytes per step for gradients of these shapes with `element` bytes per element."""
        return Traffic(0, 0, 0)

    def serve(self, modules: Sequence[nn.Module], context: Context, *, steps: int) -> None:
        """The main loop of an aggregator rank; `modules` holds each phase's module, which does not train here."""
        raise AssertionError("this strategy has no aggregator ranks")


class RingTrafficStrategy(Strategy):
    """A strategy that sends as much as a ring all-reduce of the gradients."""

    formula = "2(N-1)/N*S"
    shrink = 1.0
    """Bytes sent for each byte of the gradients."""

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        return ring_traffic(total_bytes(shapes, element) * self.shrink, workers)


def load(text: str) -> Strategy:
    """The strategy of a spec such as `ddp-powersgd(rank=4)`."""
    call = parse_one(text)
    made = apply(call, STRATEGIES.get(call.name, makes=(Strategy,)))
    if not isinstance(made, Strategy):
        raise UsageError(f"'{text}' gives a {type(made).__name__}: a subclass of Strategy is needed")
    return made


def total_bytes(shapes: Sequence[torch.Size], element: int) -> int:
    """S: the size of all gradients."""
    return sum(shape.numel() for shape in shapes) * element


def ring_traffic(size: float, workers: int) -> Traffic:
    """The traffic of a ring all-reduce: every rank sends and receives 2(N-1)/N S at the same time."""
    moved = 2 * (workers - 1) / workers * size
    return Traffic(moved, moved, moved)


def flatten(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """One flat copy per dtype, with the tensors it was made of; `unflatten` writes it back."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [(torch.cat([t.reshape(-1) for t in members]), members) for members in by_dtype.values()]


def unflatten(flat: Tensor, members: Sequence[Tensor]) -> None:
    """Copy a flat tensor's parts back into the tensors it was made of."""
    for part, tensor in zip(flat.split([t.numel() for t in members]), members, strict=True):
        tensor.copy_(part.view_as(tensor))
