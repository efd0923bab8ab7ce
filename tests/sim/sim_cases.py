"""Scenarios for the simulator's tests: random ones for hypothesis, and VGG19 of the headline."""

import random

from hypothesis import strategies as st

from syncline.sim import Job, Layer, Scenario, Transfer

TIMES = st.integers(0, 8).map(float)  # whole numbers: ties are common


@st.composite
def scenarios(draw: st.DrawFn, *, most_rounds: int = 2, contended: bool = True, **fixed: object) -> Scenario:
    units = draw(st.integers(1, 5))
    count = draw(st.integers(1, 5))
    place = [draw(st.integers(0, count - 1)) for _ in range(units)]
    layers = tuple(
        Layer(f"layer{i}", draw(TIMES), draw(TIMES), tuple(u for u in range(units) if place[u] == i))
        for i in range(count)
    )
    jobs = []
    for unit in range(units):
        for _ in range(draw(st.integers(0, 2))):
            rounds = tuple(Transfer(draw(TIMES), draw(TIMES)) for _ in range(draw(st.integers(0, most_rounds))))
            jobs.append(Job(unit, place[unit], draw(TIMES), rounds, draw(TIMES), draw(TIMES)))
    fields = {
        "data": draw(TIMES),
        "lanes": draw(st.integers(1, 4)),
        "rival": draw(st.booleans()),
        "contention": draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])) if contended else 0.0,
        "drag": draw(st.sampled_from([0.0, 0.0, 0.4, 1.5])) if contended else 0.0,
        "pipelined": draw(st.booleans()),
    }
    return Scenario(layers, tuple(draw(st.permutations(jobs))), tuple(draw(TIMES) for _ in place), **fields | fixed)


def random_scenario(seed: int) -> Scenario:
    """Times without ties, so that nothing depends on who is first of two that come at once."""
    rng = random.Random(seed)
    units, count = rng.randint(1, 6), rng.randint(1, 5)
    place = [rng.randrange(count) for _ in range(units)]
    kept = [u for u in range(units) if rng.random() < 0.9]  # the others are needed by no layer
    layers = tuple(
        Layer(f"layer{i}", rng.random(), rng.random(), tuple(u for u in kept if place[u] == i)) for i in range(count)
    )
    scale = rng.choice([0.1, 0.5, 2.0])
    jobs = [
        Job(
            unit,
            place[unit],
            rng.random() / 5,
            tuple(Transfer(rng.random() / 9, rng.random() * scale) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))),
            rng.random() / 9,
            rng.random() / 5,
        )
        for unit in range(units)
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    rng.shuffle(jobs)
    return Scenario(
        layers,
        tuple(jobs),
        tuple(rng.random() / 4 for _ in range(units)),
        data=rng.random() / 4,
        lanes=rng.randint(1, 4),
        rival=rng.random() < 0.2,
        contention=rng.choice([0.0, 0.0, 0.3, 1.0]),
        drag=rng.choice([0.0, 0.0, 0.5]),
        pipelined=rng.random() < 0.5,
    )


def vgg19(compute: float, *, bias_apart: bool = False) -> Scenario:
    """The headline's VGG19 with PowerSGD rank 64 between two nodes of 119 MB/s, jobs first in, first out.

    Assumed, not measured: a layer's compute goes by its multiplications, a third of it in the forward pass; a round's
    latency is 0.1 ms; encoding, orthonormalising and decoding each take 3 ps a byte of the gradient, an update 5 ps;
    no contention, six lanes as in the engine; a bias travels with its weight's first round. `bias_apart`: the first
    layer's bias is a unit of its own, the last job, and held until the rounds of all jobs before it are over: the
    prototype that was measured decoded on one stream, in launch order.
    """
    shapes, before, side = [], 3, 224
    for width in (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0):
        if width:
            shapes.append((width, 9 * before, side * side))
        before, side = width or before, side if width else side // 2
    shapes += [(4096, 25088, 1), (4096, 4096, 1), (1000, 4096, 1)]
    work = sum(rows * columns * places for rows, columns, places in shapes)
    layers, jobs, updates = [], [], []
    for i, (rows, columns, places) in enumerate(shapes):
        share = rows * columns * places / work
        layers.append(Layer(f"layer{i}", compute * share / 3, compute * share * 2 / 3, (i,)))
        pays = 64 * (rows + columns) < rows * columns
        sizes = (64 * rows + rows, 64 * columns) if pays else (rows * columns + rows,)
        rounds = tuple(Transfer(1e-4, 4 * size / 119e6) for size in sizes)
        codec = 4 * rows * columns * 3e-12
        jobs.append(Job(i, i, codec, rounds, codec, codec))
        updates.append(4 * rows * columns * 5e-12)
    if bias_apart:
        layers[0] = Layer("layer0", layers[0].forward, layers[0].backward, (0, len(shapes)))
        jobs.insert(0, Job(len(shapes), 0, 0.0, (Transfer(0.0, 0.0), Transfer(1e-4, 64 * 4 / 119e6))))
        updates.append(0.0)
    return Scenario(tuple(layers), tuple(reversed(jobs)), tuple(updates), lanes=6)
