"""What codecs did to training: points of accuracy lost against dense, from `syncline bench convergence`.

`POINTS` are those of benchmarks/results/convergence.json (codecs at their defaults, one seed), `CHOSEN` of
convergence-vgg19-h200.json (three seeds), both on Fashion-MNIST; a test compares them. The planner chooses only what
stays within a budget.
"""

POINTS = {
    "bf16": -0.3,
    "fp16": -0.2,
    "natural": -0.3,
    "int8": 0.0,
    "int4": 0.0,
    "terngrad": 0.2,
    "dgc": 0.4,
    "qsgd": 0.5,
    "threshold": 0.9,
    "powersgd": 1.0,
    "onebit": 1.2,
    "efsignsgd": 1.3,
    "topk": 1.8,
    "graddrop": 1.9,
    "acpsgd": 3.2,
    "tbq": 6.0,
    "randomk": 13.1,
}
CHOSEN = {"powersgd(rank=32) | bf16": -0.2}
"""Codecs with options that their defaults do not have, on a GPU; the mean over seeds.

Not for CPUs: there VGG11 with SGD lay behind dense with it, in its first 80 steps and over three seeds.
"""
NOISE = 0.6
"""Below this nothing can be told from one run: a codec within it is as good as dense."""
_OWN_MOMENTUM = {"dgc"}
_DOMINATED = {"fp16", "natural", "qsgd"}


def within(points: float, *, device: str = "cpu") -> list[str]:
    """Codecs that may be chosen inside a budget on a kind of device, best quality first.

    Not those that bring their own momentum, nor those that another of the same budget beats in bytes and in speed.
    """
    known = POINTS | (CHOSEN if device == "cuda" else {})
    names = [name for name, lost in known.items() if lost <= points and name not in _OWN_MOMENTUM | _DOMINATED]
    # What was seen on one network alone comes after what all codecs were seen on.
    return sorted((name for name in names if name != "bf16"), key=lambda name: (name in CHOSEN, known[name]))
