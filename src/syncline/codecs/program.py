"""Run one codec on one gradient in one step: views, error feedback and chains around the author's generator.

A driver uses `Run`: `start` returns the first request, `resume` takes its answer and returns the next one, until a
`Result` comes. No state is kept unless the driver keeps `Result.state`.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Coder, join, split, then
from syncline.codecs.definition import Definition
from syncline.codecs.requests import Gather, Mean, Merge, Out, Product, Request, Result, Steps, Sum, relay
from syncline.codecs.state import Memory, State, Tensors
from syncline.codecs.wire import layout_of


class Runnable(Protocol):
    """The parts of a built `Codec` that a run uses."""

    @property
    def definition(self) -> Definition: ...
    @property
    def feedback(self) -> bool | str: ...
    @property
    def view(self) -> str: ...
    @property
    def spread(self) -> bool: ...
    @property
    def direct(self) -> bool: ...
    @property
    def tail(self) -> Coder | None: ...
    def generate(self, grad: Tensor, state: State) -> Steps:
        """The author's generator on a gradient, without error feedback and chain."""
        ...


class Run:
    """One codec running on one gradient. Many runs can be open at the same time."""

    def __init__(
        self, codec: Runnable, *, names: tuple[str, ...] = ("grad",), step: int = 0, rank: int = 0, world: int = 1,
        seed: int = 0, lengths: tuple[int, ...] | None = None, memory: Memory | None = None,
    ) -> None:  # fmt: skip
        self.codec = codec
        self.state = State({}, names, step, rank, world, seed, lengths=lengths, memory=memory)
        self._steps: Any = None

    def start(
        self, grad: Tensor, state: Tensors | None = None, *, scratch: bool = False, compensated: bool = False
    ) -> Request | Result:
        """Begin with a gradient, packed by a `Batch`, and the state tensors that were committed last.

        Returns the first request, or the result. `scratch` allows the run to overwrite the gradient; `compensated`: the
        residual is added already (see `adds_residual`).
        """
        self.state.tensors = state or {}
        self._steps = _program(self.codec, grad.detach(), self.state, scratch=scratch, compensated=compensated)
        return self.resume(None)

    def resume(self, answer: Any) -> Request | Result:
        """Continue with the answer to the last request; returns the next request, or the result."""
        with torch.no_grad():
            try:
                request: Request = self._steps.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result
        return request


def adds_residual(codec: Runnable, state: Tensors, dtype: torch.dtype) -> bool:
    """Whether a run starts with gradient + residual, elsewise unchanged, so that its driver may add them."""
    plain = codec.feedback is True and not codec.direct and dtype == torch.float32
    return plain and "error" in state and state["error"].dtype == dtype


def _program(codec: Runnable, grad: Tensor, state: State, *, scratch: bool, compensated: bool) -> Any:
    if not grad.dtype.is_floating_point:
        raise ValueError(f"a float gradient is needed, not {grad.dtype}")
    state.dtype, shape = grad.dtype, grad.shape
    x = _viewed(grad, codec)
    x = x if x.dtype == torch.float64 and codec.definition.native else x.float()
    if codec.spread and x.numel():
        # Make the whole gradient nan if one value is: the codec might not send that value.
        x = _spread(x)
    scratch = scratch or x.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()
    del grad  # the caller may have no other use for its memory
    direct = codec.direct and codec.feedback != "own"
    if compensated:
        state.compensated, state.reusable = x, scratch
    elif codec.feedback is True and not direct:
        x = state.compensate(x, scratch=scratch)
    steps = _chained(codec, x, state)
    steps = _direct(steps, state, keep=bool(codec.feedback)) if direct else steps
    out = yield from steps
    keep = dict(out.state)
    if codec.feedback:
        if direct and out.residual is None:  # a driver that answers with `own` alone
            state.compensate(x)
        keep["error"] = (_residual(codec, state, out) if out.residual is None else out.residual).view(shape)
    # A float16 output may overflow where the mean did not.
    sample = None if state.dtype == torch.float16 else out.sample
    if isinstance(out.mean, Product) and state.dtype == torch.float32:
        return Result(out.mean, shape, keep, sample)
    mean = out.mean.tensor() if isinstance(out.mean, Product) else out.mean
    return Result(mean.to(state.dtype).view(shape), shape, keep, sample)


def _direct(steps: Steps, state: State, *, keep: bool) -> Steps:
    """The same requests, each with the residual. With `keep`, the exchange answers with the new residual."""
    error = state.tensors.get("error") if keep else None

    def hand_over(request: Merge) -> Generator[Request, Any, Any]:
        residual = None if error is None else error.view(request.tensor.shape)
        return (yield replace(request, own=False, keep=keep, residual=residual))

    out: Out = yield from relay(steps, hand_over)
    return out


def _spread(x: Tensor) -> Tensor:
    if x.device.type == "meta":
        return x
    if x.device.type == "cpu":
        return x if ops.finite(x) else x + torch.nan
    # On other devices, reading the value would block the host.
    norm: Tensor = torch.linalg.vector_norm(x, torch.inf)
    return x + norm * 0


def _residual(codec: Runnable, state: State, out: Out) -> Tensor:
    """The residual: what was not sent. Reuses the memory of the compensated gradient if nobody else holds it."""
    whole = state.compensated
    assert whole is not None, f"codec '{codec}' has feedback='own' and did not compensate"
    kept = (*((out.mean.left, out.mean.right) if isinstance(out.mean, Product) else (out.mean,)), *out.state.values())
    used = {t.untyped_storage().data_ptr() for t in kept}
    free = state.reusable and whole.untyped_storage().data_ptr() not in used
    if isinstance(out.mean, Product) and out.own is None and state.rank < state.world:
        return out.mean.taken_from(whole, scratch=free)
    share = _share(out, state)
    return torch.sub(whole, share.view_as(whole), out=whole if free and whole.dtype == share.dtype else None)


def _share(out: Out, state: State) -> Tensor:
    if out.own is not None:
        return out.own
    mean: Tensor = out.mean.tensor() if isinstance(out.mean, Product) else out.mean
    # A rank that only aggregates for others (rank >= world) had no share in the mean.
    return mean if state.rank < state.world else torch.zeros_like(mean)


def _viewed(grad: Tensor, codec: Runnable) -> Tensor:
    if codec.view == "flat" or grad.dim() < 2:
        return grad.reshape(-1)
    # Three dimensions are a batch of matrices, as `group.Batch` packs them.
    # Products of the same values in another memory layout would be rounded differently.
    return (grad if grad.dim() == 3 else grad.reshape(1, grad.shape[0], -1)).contiguous()


def _chained(codec: Runnable, x: Tensor, state: State) -> Steps:
    """The author's generator, with its payloads encoded by the rest of the chain."""
    tail = codec.tail
    if tail is None:
        return (yield from codec.generate(x, state))

    seed = state.rank_seed if tail.seeded else 0

    def encoded(request: Request) -> Generator[Request, Any, Any]:
        if isinstance(request, Mean | Sum):
            merged = yield Merge(request.tensor, tail, seed, isinstance(request, Mean), own=False)
            return merged.mean.to(request.tensor.dtype)
        if isinstance(request, Merge):
            return (yield replace(request, coder=then(request.coder, tail)))
        layout = layout_of(request.payload)
        replies = yield Gather(split(request.payload, tail))
        return [join(reply, tail, layout) for reply in replies]

    out: Out = yield from relay(codec.generate(x, state), encoded)
    return out
