"""Requests that a codec yields (`Mean`, `Sum`, `Merge`, `Gather`) and the types of their answers.

A codec yields one request at a time and is resumed with the answer.

| request | answer | the network may |
|---|---|---|
| `Mean(x)` | the mean of x over the ranks | add the tensors anywhere |
| `Sum(x)` | the sum of x over the ranks | the same |
| `Merge(x, coder)` | `Out(mean, own)` | split x, encode the shards, decode, merge, encode again |
| `Gather(payload)` | every rank's payload, in rank order | only carry the bytes |
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline.codecs.coder import DENSE, Coder, Payload, cast, kernel_pays, saturated, scaled


@dataclass(frozen=True)
class Mean:
    """Ask for the mean of `tensor` over the ranks."""

    tensor: Tensor


@dataclass(frozen=True)
class Sum:
    """Ask for the sum of `tensor` over the ranks."""

    tensor: Tensor


@dataclass(frozen=True)
class Merge:
    """Ask for the mean of `tensor`, whose shards are sent as `coder` writes them.

    The answer is an `Out`: the mean as it arrived, and `own`, this rank's contribution to it after compression. If
    an exchange encodes a partial sum again, the rank that does so subtracts the loss from its `own`. So the mean of
    `own` over the ranks is the mean that arrived, but for the rounding of a backend's sum in half precision.
    `mean=False` asks for the sum. `own=False` says that nobody reads `own`, so it need not be computed.
    `scratch=True` allows the exchange to overwrite the tensor.

    `residual` is added to the tensor before it is sent. With `keep=True` the answer has the new residual: what of
    the sum this rank did not send. An encoder can do both in one pass over memory (`Coder.encode_residual`).
    """

    tensor: Tensor
    coder: Coder = DENSE
    seed: int = 0
    mean: bool = True
    own: bool = True
    scratch: bool = False
    residual: Tensor | None = None
    keep: bool = False

    @property
    def tracks_loss(self) -> bool:
        """Whether the answer depends on what encoding loses."""
        return self.own or self.keep

    def whole(self) -> Tensor:
        """The tensor with the residual added."""
        return self.tensor if self.residual is None else self.tensor + self.residual

    def out(self, mean: Tensor, lost: Tensor | None) -> "Out":
        """The answer, from the mean and what this rank did not send; `lost` is None if that is nothing."""
        own = self.tensor  # nobody reads it without `own`
        if self.own:
            own = self.whole() if lost is None else self.whole() - lost
        residual = torch.zeros_like(self.tensor) if self.keep and lost is None else lost
        return Out(mean, own, residual=residual if self.keep else None)


@dataclass(frozen=True)
class Gather:
    """Ask for the payloads of all ranks: tensors whose shapes and dtypes are the same on every rank."""

    payload: Payload


Request = Mean | Sum | Merge | Gather


@dataclass(frozen=True)
class Product:
    """The product of two stacks of matrices, not computed yet: whoever needs it chooses the memory for it."""

    left: Tensor
    right: Tensor

    def tensor(self) -> Tensor:
        """The product, in new memory."""
        return self.left @ self.right

    def write(self, into: Tensor) -> None:
        """Compute the product in the memory of a contiguous float32 tensor."""
        shape = (*self.left.shape[:2], self.right.shape[2])
        torch.bmm(self.left, self.right, out=into.view(shape))

    def taken_from(self, whole: Tensor, *, scratch: bool) -> Tensor:
        """`whole` minus the product; `scratch`: in the memory of `whole`."""
        return torch.baddbmm(whole, self.left, self.right, alpha=-1, out=whole if scratch else None)


class Out(NamedTuple):
    """The result of a codec, and the answer to a `Merge`.

    `mean` is the averaged gradient, the same bits on every rank; a codec may return it as a `Product`. `own` is this
    rank's contribution to it; error feedback keeps the difference. `own` is `None` if the contribution cannot be
    separated from the mean: then the mean is used instead. `state` holds the tensors to keep for the next step.
    `residual` is the new residual, in the answer to a `Merge` that asked for it (`keep=True`). `sample` may be a part
    of the mean that is not finite if any value of the mean is not: it is cheaper to check.
    """

    mean: Any
    own: Tensor | None = None
    state: Mapping[str, Tensor] = {}
    residual: Tensor | None = None
    sample: Tensor | None = None


Steps = Generator[Request, Any, Out]
"""The type of a codec's generator."""
Merges = Generator[Merge, Out, Out]
"""The type of a codec's generator that yields nothing but `Merge`."""


@dataclass(frozen=True)
class Result:
    """Result of a run: the averaged gradient, perhaps as a product of this shape, and the state to commit.

    If any value of the output is not finite, one of `sample` is not; None stands for the whole output.
    """

    mean: "Tensor | Product"
    shape: torch.Size
    state: Mapping[str, Tensor] = field(default_factory=dict)
    sample: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """The averaged gradient in the gradient's shape and dtype; a product is computed now."""
        return self.mean.tensor().view(self.shape) if isinstance(self.mean, Product) else self.mean


def relay(steps: Generator[Any, Any, Any], answered: Callable[[Any], Generator[Any, Any, Any]]) -> Any:
    """Run a generator inside another: what it yields goes through `answered`, a generator that returns the answer."""
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield from answered(request)


def lower(request: Request) -> Merge:
    """Express `Mean` and `Sum` as a `Merge` of uncompressed values, and flatten the tensor of a `Merge`."""
    assert not isinstance(request, Gather)
    if isinstance(request, Merge):
        if request.tensor.dim() == 1:
            return request
        residual = None if request.residual is None else request.residual.reshape(-1)
        return replace(request, tensor=request.tensor.reshape(-1), residual=residual)
    return Merge(request.tensor.reshape(-1), cast(request.tensor.dtype), 0, isinstance(request, Mean), own=False)


def answer(request: Request, out: Out) -> Any:
    """The answer to the codec that yielded `request`, from the `Out` of the lowered request."""
    assert not isinstance(request, Gather)
    shape = request.tensor.shape
    if isinstance(request, Merge):
        own, residual = (None if part is None else part.view(shape) for part in (out.own, out.residual))
        return Out(out.mean.view(shape), own, residual=residual)
    return out.mean.to(request.tensor.dtype).view(shape)


def halves_exactly(world: int) -> bool:
    """Whether division by `world` only changes exponents, so that it may come before or after rounding."""
    return world & (world - 1) == 0


def adding(merge: Merge, world: int) -> tuple[Tensor, Tensor | None]:
    """For a coder whose payloads add: the tensor to sum over `world` ranks, and what this rank loses (None: nothing).

    It divides before the sum, as DDP does, so that half precision does not overflow.
    """
    share = 1 / world if merge.mean else 1.0
    whole = merge.whole()
    plain = whole.dtype == torch.float32 and not merge.tracks_loss
    half = next((dtype for dtype in (torch.bfloat16, torch.float16) if merge.coder.writes(dtype)), None)
    # Clipping to float16's range is a kernel of ours in any case.
    if plain and half is not None and (kernel_pays(whole) or (whole.device.type == "cuda" and half == torch.float16)):
        return scaled(whole, share, half), None
    x = saturated(whole) if half == torch.float16 else whole
    if plain and share != 1 and half == torch.bfloat16:
        if halves_exactly(world):  # two passes, each several times faster than the one below
            return x.to(torch.bfloat16).mul_(share), None
        return torch.mul(x, share, out=torch.empty_like(x, dtype=torch.bfloat16)), None
    if share != 1:
        x = x.mul_(share) if merge.scratch and x is merge.tensor else x * share
    (part,) = merge.coder.encode(x, seed=merge.seed)
    if not merge.tracks_loss or merge.coder.writes(merge.tensor.dtype):
        return part, None
    own = merge.coder.decode((part,), x.numel(), seed=merge.seed)
    return part, whole - (own if share == 1 else own * world)
