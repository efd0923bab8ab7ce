"""randomk: random values, at the same positions on every rank."""

import math

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State


@codec("randomk", carries="values", spread=True)
def randomk(grad: Tensor, state: State, *, ratio: float = 0.25) -> Steps:
    """Send a random `ratio` of the values, the same on all ranks, one from each equal interval, times its length.

    Paper: J. Konecny et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016 (random mask);
    S. Stich et al., Sparsified SGD with Memory, NeurIPS 2018 (with `feedback=true`, and then not scaled).
    Formula: out = mean(g) * n/k at k random positions, one in each of k = ceil(ratio * n) intervals; else 0. Unbiased.
    Use it: the cheapest sparsifier; values add, so all-reduce can carry them. Its variance is (1/ratio - 1) of g**2.
    A residual is worse than that variance: a value waits 1/ratio steps and then arrives as a sum, on top of momentum.
    Costs: 4 bytes per value sent, no indices; no state; no pass over the gradient.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}: use a number above 0 and up to 1")
    count = grad.numel()
    k = math.ceil(ratio * count)
    # An interval is never empty because k <= count; float64, because float32 cannot represent large positions.
    edge = torch.arange(k + 1, device=grad.device, dtype=torch.int64) * count // max(k, 1)
    noise = ops.uniform(k, seed=state.shared_seed, device=grad.device).double()
    places = edge[:-1] + (noise * (edge[1:] - edge[:-1])).long()
    # Without a residual, a value is sent for its whole interval.
    weight = 1 if state.compensated is not None else (edge[1:] - edge[:-1]).to(grad.dtype)
    sent = yield Merge(grad[places] * weight, state.dense)
    mean, own = (torch.zeros_like(grad).index_copy_(0, places, v.to(grad.dtype)) for v in sent[:2])
    return Out(mean, own)
