"""Costs for the planner's tests: guessed from shapes, the same on every machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from model_shapes import layer

from syncline.plan import CodecCost, Costs, Curve, LinkCost, Shape

CODECS = {
    "none": CodecCost(Curve(5e-6, 1e-13), Curve(), Curve(5e-6, 1e-13)),
    "bf16": CodecCost(Curve(1e-5, 5e-13), Curve(), Curve(1e-5, 5e-13)),
    "int8": CodecCost(Curve(3e-5, 2e-12), Curve(), Curve(3e-5, 4e-12)),
    "int4": CodecCost(Curve(3e-5, 2e-12), Curve(), Curve(3e-5, 4e-12)),
    "terngrad": CodecCost(Curve(3e-5, 4e-12), Curve(), Curve(3e-5, 4e-12)),
    "powersgd(rank=64)": CodecCost(Curve(2e-5, 1.2e-11), Curve(2e-5, 1.2e-11), Curve(2e-5, 1.2e-11)),
}
"""About what an H200 takes; seconds over values."""


def costs(
    shapes: Sequence[Shape],
    compute: float,
    *,
    weights: Mapping[str, float] | None = None,
    world: int = 2,
    bytes_per_s: float = 119e6,
    latency: float = 1e-4,
    slow: float = 1.0,
    **fields: Any,
) -> Costs:
    """A third of the compute forward, two backward; a parameter's share goes by its weight, else by its values.

    `slow`: by what factor codecs are slower than those of `CODECS`.
    """
    share = [weights.get(s.name, 0.0) if weights else float(s.values) for s in shapes]
    total, now = sum(share), 0.0
    touched, complete = {}, {}
    for shape, mine in zip(shapes, share, strict=True):
        module = shape.name.rpartition(".")[0]
        start = next((touched[n] for n in touched if n.rpartition(".")[0] == module), now / total * compute / 3)
        touched[shape.name] = start
        complete[shape.name] = (1 - now / total) * compute * 2 / 3
        now += mine
    table = {
        name: CodecCost(*(Curve(c.fixed * slow, c.each * slow) for c in (cost.encode, cost.between, cost.decode)))
        for name, cost in CODECS.items()
    }
    every = {"lanes": 6, **fields}
    link = LinkCost(latency, bytes_per_s)
    return Costs(world, compute / 3, compute * 2 / 3, touched, complete, link, table, Curve(5e-6, 2e-11), **every)


def by_multiplications(shapes: Sequence[Shape], side: int = 224) -> dict[str, float]:
    """Of a VGG: a convolution's values are used at every place of its picture."""
    pools, weights = (4, 9, 18, 27, 36), {}
    for shape in shapes:
        kind, at = shape.name.split(".")[:2]
        places = (side >> sum(pool < int(at) for pool in pools)) ** 2 if kind == "features" else 1
        weights[shape.name] = float(shape.values * places)
    return weights


def bert(layers: int = 24, width: int = 1024) -> list[Shape]:
    """BERT-large's parameters, about 400 tensors."""
    shapes = [Shape("embeddings.word.weight", (30522, width)), Shape("embeddings.position.weight", (512, width))]
    shapes += layer("embeddings.norm", (width,))
    for n in range(layers):
        here = f"layer.{n}"
        for name in ("query", "key", "value", "out"):
            shapes += layer(f"{here}.attention.{name}", (width, width))
        shapes += layer(f"{here}.attention.norm", (width,))
        shapes += layer(f"{here}.up", (4 * width, width)) + layer(f"{here}.down", (width, 4 * width))
        shapes += layer(f"{here}.norm", (width,))
    return [*shapes, *layer("pooler", (width, width)), *layer("head", (2, width))]
