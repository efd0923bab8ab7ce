"""The codecs that the conformance suites run: every registered one, and some chains. A new codec is in by itself."""

from torch import Tensor

from syncline import codecs

NEEDS_ARGUMENTS = {"warmup": "warmup(topk(0.1), steps=1)"}
CHAINS = [
    "topk(0.1) | int8",
    "topk(0.1) | int8 | bf16",
    "randomk(0.2) | fp16",
    "randomk(0.2) | int8",
    "dgc(0.1) | bf16",
    "dgc(0.1, optimizer_momentum=0.9)",
    "powersgd(rank=2) | bf16",
    "powersgd(rank=2) | int8",
    "acpsgd(rank=2) | bf16",
    "onebit | bf16",
    "none | int4",
    "warmup(dgc(0.05), steps=2, ramp=true) | fp16",
    "warmup(powersgd(rank=2), steps=1)",
]
SPECS = [NEEDS_ARGUMENTS.get(name, name) for name in codecs.available()] + CHAINS


def momentum_of(spec: str, state: dict[str, Tensor], name: str) -> Tensor | float:
    """What a codec adds to the gradient by itself: dgc's momentum."""
    if "dgc" in spec and f"{name}.momentum" in state:
        return 0.9 * state[f"{name}.momentum"]
    return 0.0
