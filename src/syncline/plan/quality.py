"""Accuracy lost by each codec against dense training, in points, from `syncline bench convergence`.

`POINTS` comes from benchmarks/results/convergence.json (default options, one seed), `CHOSEN` from
convergence-vgg19-h200.json (three seeds), both on Fashion-MNIST; a test compares them. The planner only chooses codecs
within a budget.
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
"""Codecs with other than default options, on a GPU; the mean over seeds.

Not for CPUs: there VGG11 with SGD had a higher loss than dense in its first 80 steps, with each of three seeds.
"""
NOISE = 0.6
"""Noise of one run, in points: a codec that loses less counts as equal to dense."""
_OWN_MOMENTUM = {"dgc"}
_DOMINATED = {"fp16", "natural", "qsgd"}


def within(points: float, *, device: str = "cpu") -> list[str]:
    """Codecs within a budget of points on a kind of device, best quality first.

    Codecs with their own momentum are left out, and so are those that another codec beats in bytes and in speed.
    """
    known = POINTS | (CHOSEN if device == "cuda" else {})
    names = [name for name, lost in known.items() if lost <= points and name not in _OWN_MOMENTUM | _DOMINATED]
    # Codecs measured on one model only come after those of the common benchmark.
    return sorted((name for name in names if name != "bf16"), key=lambda name: (name in CHOSEN, known[name]))
