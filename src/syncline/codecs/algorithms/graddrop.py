"""graddrop: drop all but the largest values, by a threshold found from a sample."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.coder import Payload, coder
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Merges
from syncline.codecs.state import State

SLACK = 1.25
"""Slots for each value expected: a sample's threshold is off by some percent, and what does not fit waits."""
SMALLEST = 2.0**-126


def encode(x: Tensor, *, ratio: float, seed: int) -> Payload:
    """Values above a sampled threshold and their places, in a list of fixed length; dgc sends the same."""
    slots = min(x.numel(), math.ceil(SLACK * ratio * x.numel()))
    # A gradient that is mostly zero has threshold zero: its zeros must not fill the slots.
    tau = ops.sampled_threshold(x, ratio=ratio, seed=seed).clamp(min=SMALLEST)
    values, indices, _ = ops.compact(x, threshold=tau, capacity=slots)
    return values, indices


def decode(payload: Payload, count: int, *, onto: Tensor | None = None, divisor: int = 1) -> Tensor:
    """The sparse values in a dense tensor; all codecs that send values with their positions use it."""
    values, indices = payload
    return ops.densify(values, indices, count, onto=onto, divisor=divisor)


def leaving_rest(encode: Callable[..., Payload]) -> Callable[..., tuple[Payload, Tensor]]:
    """The residual encoder for an encoder of sparse values: the new residual is everything that was not sent."""

    @wraps(encode)
    def encode_residual(x: Tensor, residual: Tensor | None, **options: Any) -> tuple[Payload, Tensor]:
        whole = x.clone() if residual is None else x + residual
        values, indices = encode(whole, **options)
        return (values, indices), ops.scatter_add(whole, indices, -values, unique=True)

    return encode_residual


_encode_residual = leaving_rest(encode)


@codec("graddrop", feedback=True, direct=True, carries="values", spread=True)
def graddrop(grad: Tensor, state: State, *, ratio: float = 0.01) -> Merges:
    """Send the values above a threshold that about `ratio` of them reach, estimated from a sample.

    Paper: A. Aji and K. Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017.
    Formula: t = the (1 - ratio) quantile of |sample of g|; out = mean of (g where |g| >= t, else 0).
    Use it: like topk with a far cheaper selection; the number sent varies a little around ratio * n.
    Costs: 8 bytes for each of 1.25 * ratio * n slots; one residual tensor; one pass and a small sort.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}: use a number above 0 and up to 1")
    return (
        yield Merge(grad, coder(encode, decode, residual_encoder=_encode_residual, ratio=float(ratio)), state.rank_seed)
    )
