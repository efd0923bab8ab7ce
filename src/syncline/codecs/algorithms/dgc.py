"""dgc: the largest values of the accumulated momentum."""

import torch
from torch import Tensor

from syncline.codecs.algorithms.graddrop import decode, encode
from syncline.codecs.definition import codec
from syncline.codecs.requests import Gather, Out, Steps
from syncline.codecs.state import State


@codec("dgc", feedback="own", carries="values", spread=True)
def dgc(
    grad: Tensor, state: State, *, ratio: float = 0.01, momentum: float = 0.9, clip: float = 0.0,
    optimizer_momentum: float = 0.0,
) -> Steps:  # fmt: skip
    """Accumulate momentum locally, send what has grown large, and forget the momentum of what was sent.

    Paper: Y. Lin et al., Deep Gradient Compression, ICLR 2018 (momentum correction, factor masking, clipping).
    Formula: u = momentum * u + g; v = v + u; out = mean of (v where |v| >= t, else 0); u, v = 0 where sent.
    Use it: 100- to 1000-fold on slow links, with SGD without momentum: the momentum is in here. For an SGD that has
    one, name it (`optimizer_momentum=0.9`): what it will add is subtracted from the output. Warm it up with
    `warmup(dgc(0.001), steps=1000, ramp=true)`. `clip` bounds the norm of g, times 1/sqrt(ranks).
    Costs: 8 bytes for each of 1.25 * ratio * n slots; residual and momentum tensors; a pass and a small sort.
    """
    if not 0 < ratio <= 1 or not 0 <= momentum < 1 or clip < 0 or not 0 <= optimizer_momentum < 1:
        given = f"ratio {ratio}, momentum {momentum}, clip {clip}, optimizer_momentum {optimizer_momentum}"
        raise ValueError(f"{given}: use 0..1, 0..<1, 0 or more, and 0..<1")
    if clip:
        grad = grad * (clip / state.world**0.5 / grad.norm().clamp(min=1e-30)).clamp(max=1)
    u = torch.add(grad, state.get("momentum", grad.new_zeros(()).expand_as(grad)).view_as(grad), alpha=momentum)
    v = state.compensate(u)
    replies = yield Gather(encode(v, ratio=ratio, seed=state.rank_seed))
    parts = [decode(reply, v.numel()) for reply in replies]
    own = parts[state.rank]
    kept = {"momentum": u * (own == 0)}
    mean = sum(parts[1:], parts[0]) / state.world
    if not optimizer_momentum:
        return Out(mean, own, kept)
    # The optimizer adds its momentum times what it has in its buffer, which is then exactly the last mean.
    before = state.get("sent", torch.zeros_like(mean)).view_as(mean)
    return Out(torch.sub(mean, before, alpha=optimizer_momentum), own, {**kept, "sent": mean})
