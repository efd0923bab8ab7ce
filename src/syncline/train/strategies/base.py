"""The strategy interface: how ranks average the gradients of one phase, and how many bytes that sends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.registry import Registry
from syncline.spec import apply, parse_one
from syncline.trace import Recorder

STRATEGIES: Registry[type["Strategy"]] = Registry("strategy")
strategy = STRATEGIES.register
"""Decorator `@strategy(name)`: register a strategy class."""


@dataclass(frozen=True)
class Context:
    """A rank among its peers. Workers are ranks 0..workers-1; aggregators, if any, come after them."""

    rank: int
    workers: int
    recorder: Recorder
    group: dist.ProcessGroup | None = None
    """The workers' group; None stands for the default group."""


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
    needs_rehearsal = False
    """Whether the first backward pass prepares something (DDP's buckets) that a resumed run must have, too."""

    def __init__(self, module: nn.Module, context: Context) -> None:
        self.module = module
        self.context = context
        self.recorder = context.recorder
        self.parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]

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
    resumable = True
    """False where a checkpoint cannot hold the strategy's state."""

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        """Bind a phase's module, and its optimizer where the strategy needs it, to this strategy on this rank."""
        return type(self).synchroniser(module, context)

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        """Theoretical bytes per step for gradients of these shapes with `element` bytes per element."""
        return Traffic(0, 0, 0)

    def serve(self, parameters: Iterable[Sequence[Tensor]], context: Context, *, steps: int) -> None:
        """The main loop of an aggregator rank; `parameters` holds each phase's trainable parameters."""
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
