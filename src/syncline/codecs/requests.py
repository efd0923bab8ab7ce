"""What a codec may ask of the network. A codec yields one request at a time and is resumed with the answer.

| request | answer | the network may |
|---|---|---|
| `Mean(x)` | the mean of x over the ranks | add the tensors up in any place |
| `Sum(x)` | the sum of x over the ranks | the same |
| `Merge(x, coder)` | `Out(mean, own)` | split x, encode pieces, decode, merge, encode again |
| `Gather(payload)` | every rank's payload, in rank order | carry the bytes, nothing else |
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from syncline.codecs.coder import DENSE, Coder, Payload


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
    """Ask for the mean of `tensor`, whose pieces travel as `coder` writes them.

    The answer is an `Out`: the mean as it arrived, and `own`, what this rank's tensor amounted to in it. An
    exchange that encodes a partial sum again books the loss to the rank that did so, in its `own`: over the
    ranks, the mean of `own` is the mean that arrived. `mean=False` asks for the sum. With `own=False` nobody will
    look at `own`, and it need not be made; with `scratch=True` the tensor's memory may be overwritten.
    """

    tensor: Tensor
    coder: Coder = DENSE
    seed: int = 0
    mean: bool = True
    own: bool = True
    scratch: bool = False


@dataclass(frozen=True)
class Gather:
    """Ask for everybody's payload: tensors whose shapes and dtypes are the same on every rank."""

    payload: Payload


Request = Mean | Sum | Merge | Gather


class Out(NamedTuple):
    """What a codec returns, and what answers a `Merge`.

    `mean` is the averaged gradient, the same bits on every rank; `own` what this rank contributed to it (what it
    holds back is error feedback's business), `None` if its share cannot be told from the mean, which then stands
    for it; `state` the tensors to keep for the next step.
    """

    mean: Tensor
    own: Tensor | None = None
    state: Mapping[str, Tensor] = {}


Steps = Generator[Request, Any, Out]
"""The type of a codec's generator."""


@dataclass(frozen=True)
class Result:
    """The end of a run: the averaged gradient in the gradient's shape and dtype, and the state to commit."""

    output: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
