"""randomk: random values, at the same positions on every rank."""

import math

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State


@codec("randomk", feedback=True, carries="values", spread=True)
def randomk(grad: Tensor, state: State, *, ratio: float = 0.1) -> Steps:
    """Send a random `ratio` of the values, the same on all ranks, one from each equal interval.

    Paper: S. Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
    Formula: out = mean(g) at k random positions, one in each of k = ceil(ratio * n) intervals; else 0.
    Use it: the cheapest sparsifier; values add, so all-reduce can carry them. Needs more steps than topk.
    Costs: 4 bytes per value sent, no indices; one residual tensor; no pass over the gradient but the residual's.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}: use a number above 0 and up to 1")
    count = grad.numel()
    k = math.ceil(ratio * count)
    # An interval is never empty because k <= count; float64, because float32 cannot represent large positions.
    edge = torch.arange(k + 1, device=grad.device, dtype=torch.int64) * count // max(k, 1)
    noise = ops.uniform(k, seed=state.shared_seed, device=grad.device).double()
    places = edge[:-1] + (noise * (edge[1:] - edge[:-1])).long()
    sent = yield Merge(grad[places], state.dense)
    mean, own = (torch.zeros_like(grad).index_copy_(0, places, v.to(grad.dtype)) for v in sent[:2])
    return Out(mean, own)
