"""warmup: run another codec uncompressed, or with more values, during the first steps."""

from typing import TYPE_CHECKING

from torch import Tensor

from syncline.codecs.definition import codec
from syncline.codecs.requests import Merge, Out, Steps
from syncline.codecs.state import State

if TYPE_CHECKING:
    from syncline.codecs.build import Codec

STAGES = 4


@codec("warmup", wraps=True)
def warmup(grad: Tensor, state: State, inner: "Codec", *, steps: int = 100, ramp: bool = False) -> Steps:
    """Run without compression for the first `steps` steps; with `ramp`, send fewer and fewer values.

    Paper: Y. Lin et al., Deep Gradient Compression, ICLR 2018 (warm-up training).
    Formula: step < steps: plain mean; with `ramp` the inner codec at ratio 1/4, 1/16, 1/64, 1/256 in turn, a
    quarter of the steps each, and never below its own.
    Use it: `warmup(powersgd(rank=4), steps=500)`; `warmup(dgc(0.001), steps=1000, ramp=true)`.
    Costs: what the inner codec costs, and the bytes of the first steps.
    """
    if steps < 0 or (ramp and "ratio" not in inner.options):
        raise ValueError(f"steps is {steps}: use 0 or more; ramp needs a codec with a ratio, and {inner} has none")
    if state.step >= steps:
        return (yield from inner.generate(grad, state))
    if ramp:
        ratio = 0.25 ** (1 + state.step * STAGES // steps)
        return (yield from inner.with_options(ratio=max(ratio, inner.options["ratio"])).generate(grad, state))
    if inner.feedback == "own":
        grad = state.compensate(grad)
    out: Out = yield Merge(grad, state.dense)
    return out
