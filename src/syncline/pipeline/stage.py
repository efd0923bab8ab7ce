"""The modules of a rank's stages: sublayers with a frozen prefix, what they read, and gradients for the engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syncline.pipeline.blocks import Sublayer, Values, as_values, run
from syncline.pipeline.micro_batches import MicroBatches
from syncline.pipeline.stage_clock import StageClock


class Prefix(Protocol):
    """Supplies the values behind the frozen sublayers of the first stage, such as a cache of activations."""

    @property
    def read_s(self) -> float | None:
        """Seconds to supply the values of one sample, 0 while that is not known; None if they are computed."""

    def move(self, layers: int, /) -> None:
        """From now on, the values behind the first `layers` sublayers are asked for."""

    def __call__(self, ids: Tensor, inputs: Values, /, view: int = 0) -> Any:
        """The values behind these sublayers for samples with these numbers and inputs, in this augmentation."""


class Feed:
    """What the stages of a rank read in one step: the micro-batches, with numbers and view of the samples."""

    def __init__(self, batches: MicroBatches, ids: Tensor | None, view: int, *, inputs: int) -> None:
        self.batches, self.view, self._inputs = batches, view, inputs
        self._ids = None if ids is None else ids.split(batches.rows)

    def inputs(self, index: int) -> Values:
        """What enters the model."""
        return self.batches.parts[index][: self._inputs]

    def targets(self, index: int) -> Values:
        """The targets of the real samples."""
        return tuple(t[: self.batches.counts[index]] for t in self.batches.parts[index][self._inputs :])

    def ids(self, index: int) -> Tensor | None:
        """The numbers of the samples, padding included."""
        return None if self._ids is None else self._ids[index]


class StageModule(nn.Module):
    """Some consecutive sublayers. The first `frozen` of them run without a graph and in evaluation mode.

    The first stage of a model is called with the number of a micro-batch, and takes its inputs from `feed`.
    """

    def __init__(
        self,
        sublayers: Sequence[Sublayer],
        *,
        frozen: int,
        first: bool,
        prefix: Prefix | None,
        clock: StageClock | None = None,
    ) -> None:
        super().__init__()
        self._clock = clock
        self.parts = nn.ModuleList(sublayer.module for sublayer in sublayers)
        self._frozen, self._active = tuple(sublayers[:frozen]), tuple(sublayers[frozen:])
        self._fixed = [module for sublayer in self._frozen for module in sublayer.module.modules()]
        self._first = first
        self._prefix = prefix if first and frozen else None
        if self._prefix is not None:
            self._prefix.move(frozen)
        self.feed: Feed | None = None

    def forward(self, *values: Tensor) -> Any:
        """The values for the next stage, or the model's output."""
        with nullcontext() if self._clock is None else self._clock.run("forward"):
            return self._run(values)

    def _run(self, values: Values) -> Any:
        out: Any = values if self._first else _received(values)
        if self._first:
            assert self.feed is not None
            index = int(values[0])
            out = self.feed.inputs(index)
            ids = None if self._prefix is None else self.feed.ids(index)
            if self._prefix is not None and ids is not None:
                with self._frozen_mode():
                    out = self._prefix(ids, out, view=self.feed.view)
                return self._contiguous(run(self._active, as_values(out)))
        if self._frozen:
            with torch.no_grad(), self._frozen_mode():
                out = run(self._frozen, out)
        return self._contiguous(run(self._active, as_values(out)))

    @contextmanager
    def _frozen_mode(self) -> Iterator[None]:
        """Frozen sublayers in evaluation mode, also after `model.train()`: no dropout, and BatchNorm stays as it is."""
        training = [module for module in self._fixed if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @staticmethod
    def _contiguous(out: Any) -> Any:
        values = tuple(value.contiguous() for value in as_values(out))  # as messages need them
        return values if len(values) > 1 else values[0]


class _Received(torch.autograd.Function):
    """Returns its inputs; in the backward pass, one that nobody has used gets zeros.

    With torch 2.11 every received value wants a gradient, also a mask, and an error says that it has none to send back.
    """

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Values:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _received(values: Values) -> Values:
    """What a stage got from the one before: every value that wants a gradient gets one."""
    wanted = [value for value in values if value.requires_grad]
    if len(wanted) < 2:
        return values
    passed = iter(_Received.apply(*wanted))  # type: ignore[no-untyped-call]
    return tuple(next(passed) if value.requires_grad else value for value in values)


class Held(nn.Module):
    """Some tensors of a model under their names there, as a module that an engine can be attached to."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        for path, tensor in (*parameters.items(), *buffers.items()):
            *parents, name = path.split(".")
            here: nn.Module = self
            for parent in parents:
                if parent not in dict(here.named_children()):
                    here.add_module(parent, nn.Module())
                here = here.get_submodule(parent)
            if path in buffers:
                here.register_buffer(name, tensor)
            else:
                here.register_parameter(name, parameters[path])


class _HandOver(torch.autograd.Function):
    """A backward pass that gives parameters their gradients, which exist already."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients


def hand_over(parameters: Sequence[nn.Parameter]) -> None:
    """Pass the local gradients of these parameters through a backward pass of their own, where an engine sees them.

    Schedules accumulate gradients over many passes, some of them without autograd's hooks. This is the one pass that
    the engine takes for the whole step. No gradient is copied.
    """
    ready = [p for p in parameters if p.grad is not None]
    if not ready:
        return
    gradients = [p.grad for p in ready]
    for p in ready:
        p.grad = None
    _HandOver.apply(gradients, *ready).backward()  # type: ignore[no-untyped-call]
