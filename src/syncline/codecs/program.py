"""One codec on one gradient in one step: views, error feedback and chains around the author's generator.

`Run` is how a driver works it: `start` gives the first request, `resume` takes its answer and gives the next, and
a `Result` ends it. Nothing is kept unless the driver keeps `Result.state`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import cast, join, saturated, split, then
from syncline.codecs.requests import Gather, Mean, Merge, Out, Request, Result, Steps, Sum
from syncline.codecs.state import State, Tensors
from syncline.codecs.wire import layout_of

if TYPE_CHECKING:
    from syncline.codecs.build import Codec


class Run:
    """A codec at work on one gradient. Many runs can be open at once; each holds its own place."""

    def __init__(
        self, codec: "Codec", *, names: tuple[str, ...] = ("grad",), step: int = 0, rank: int = 0, world: int = 1,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.codec = codec
        self.state = State(names=names, step=step, rank=rank, world=world, seed=seed)
        self._steps: Any = None

    def start(self, grad: Tensor, state: Tensors | None = None) -> Request | Result:
        """Begin with a gradient, packed by a `Batch`, and the tensors committed last.

        Gives the first request, or the result.
        """
        self.state.tensors = state or {}
        self._steps = _program(self.codec, grad.detach(), self.state)
        return self._advance(None)

    def resume(self, answer: Any) -> Request | Result:
        """Go on with the answer to the last request; gives the next one, or the result."""
        return self._advance(answer)

    def _advance(self, answer: Any) -> Request | Result:
        with torch.no_grad():
            try:
                request: Request = self._steps.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result
        return request


def _program(codec: "Codec", grad: Tensor, state: State) -> Any:
    if not grad.dtype.is_floating_point:
        raise ValueError(f"a float gradient is needed, not {grad.dtype}")
    state.dtype = grad.dtype
    x = _viewed(grad, codec)
    x = x if x.dtype == torch.float64 and codec.definition.native else x.float()
    factors = codec.definition.carries == "factors"
    if codec.spread and x.numel() and not factors:
        # One value that is not finite spoils all: a factorisation would hide it in some of them.
        x = _spread(x)
    if codec.feedback is True:
        x = state.compensate(x)
    steps = _chained(codec, x, state)
    out = yield from _marked(steps) if codec.spread and factors else steps
    keep = dict(out.state)
    if codec.feedback:
        assert state.compensated is not None, f"codec '{codec}' has feedback='own' and did not compensate"
        keep["error"] = _left(state, out).view(grad.shape)
    return Result(out.mean.to(grad.dtype).view(grad.shape), keep)


def _marked(steps: Steps) -> Steps:
    """The same with the first factor spoiled as a whole by one value: products of it then show that in every value.

    Whatever is not finite in a matrix is so in its product with anything; the factor is smaller, and quickly looked at.
    """
    answer: Any = None
    first = True
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            out: Out = end.value
            return out
        if first and not isinstance(request, Gather) and request.tensor.numel():
            request = replace(request, tensor=_spread(request.tensor))
        first = False
        answer = yield request


def _spread(x: Tensor) -> Tensor:
    if x.device.type == "meta":
        return x
    if x.device.type == "cpu":
        return x if ops.finite(x) else x + torch.nan
    # Elsewhere a look at the value would stop the host.
    norm: Tensor = torch.linalg.vector_norm(x, torch.inf)
    return x + norm * 0


def _left(state: State, out: Out) -> Tensor:
    """What was not sent. In the memory of the compensated gradient where nobody else has it: fresh memory is dear."""
    whole, share = state.compensated, _share(out, state)
    assert whole is not None
    used = {t.untyped_storage().data_ptr() for t in (out.mean, *out.state.values())}
    ours = "error" in state.tensors and whole.dtype == share.dtype
    free = ours and whole.untyped_storage().data_ptr() not in used
    return torch.sub(whole, share.view_as(whole), out=whole if free else None)


def _share(out: Out, state: State) -> Tensor:
    if out.own is not None:
        return out.own
    # A rank that only aggregates for others (rank >= world) had no share in the mean.
    return out.mean if state.rank < state.world else torch.zeros_like(out.mean)


def _viewed(grad: Tensor, codec: "Codec") -> Tensor:
    if codec.view == "flat" or grad.dim() < 2:
        return grad.reshape(-1)
    # Three dimensions are a batch of matrices, as `group.Batch` packs them.
    # Products of the same values in another memory layout would be rounded differently.
    return (grad if grad.dim() == 3 else grad.reshape(1, grad.shape[0], -1)).contiguous()


def _chained(codec: "Codec", x: Tensor, state: State) -> Steps:
    """The author's generator, with what it puts on the wire written by the rest of the chain."""
    steps = codec.generate(x, state)
    tail = codec.tail
    if tail is None:
        return (yield from steps)
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            out: Out = end.value
            return out
        if isinstance(request, Mean | Sum):
            merged = yield Merge(request.tensor, tail, state.rank_seed, isinstance(request, Mean), own=False)
            answer = merged.mean.to(request.tensor.dtype)
        elif isinstance(request, Merge):
            answer = yield replace(request, coder=then(request.coder, tail))
        else:
            layout = layout_of(request.payload)
            replies = yield Gather(split(request.payload, tail))
            answer = [join(reply, tail, layout) for reply in replies]


def lower(request: Request) -> Merge:
    """`Mean` and `Sum` as the `Merge` of plain values that they are; a `Merge` with its tensor flat."""
    assert not isinstance(request, Gather)
    if isinstance(request, Merge):
        return request if request.tensor.dim() == 1 else replace(request, tensor=request.tensor.reshape(-1))
    return Merge(request.tensor.reshape(-1), cast(request.tensor.dtype), 0, isinstance(request, Mean), own=False)


def answer(request: Request, out: Out) -> Any:
    """What the codec that yielded `request` is resumed with, from the `Out` of the lowered request."""
    assert not isinstance(request, Gather)
    shape = request.tensor.shape
    if isinstance(request, Merge):
        assert out.own is not None
        return Out(out.mean.view(shape), out.own.view(shape))
    return out.mean.to(request.tensor.dtype).view(shape)


def halves_exactly(world: int) -> bool:
    """Whether a share of 1 / world only moves exponents: then it may be taken before or after rounding."""
    return world & (world - 1) == 0


def adding(merge: Merge, world: int) -> tuple[Tensor, Tensor]:
    """For a coder that adds: the one tensor to be summed over `world` ranks, and this rank's `own`.

    The share is taken before the sum, as DDP does, so that half precision does not overflow.
    """
    share = 1 / world if merge.mean else 1.0
    x = saturated(merge.tensor) if merge.coder.writes(torch.float16) else merge.tensor
    if share != 1 and merge.coder.writes(torch.bfloat16) and x.dtype == torch.float32 and not merge.own:
        if halves_exactly(world):  # two passes, each several times faster than the one below
            return x.to(torch.bfloat16).mul_(share), merge.tensor
        return torch.mul(x, share, out=torch.empty_like(x, dtype=torch.bfloat16)), merge.tensor
    if share != 1:
        x = x.mul_(share) if merge.scratch and x is merge.tensor else x * share
    (part,) = merge.coder.encode(x, seed=merge.seed)
    if not merge.own or merge.coder.writes(merge.tensor.dtype):
        return part, merge.tensor
    own = merge.coder.decode((part,), x.numel(), seed=merge.seed)
    return part, own if share == 1 else own * world
