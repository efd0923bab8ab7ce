"""Made-up results with the figures of the classical comparison and of the scaling study, for the report's tests."""

import math
import random
from typing import Any

from syncline import stats
from syncline.results.schema import Results
from syncline.trace.span import PHASES

S = 36_900_000  # bytes of VGG-11's gradients
STRATEGIES = {
    # name: (step ms, forward, backward, exchange, wait), bytes factor as a function of N, formula
    "single": (2504.0, 0.31, 0.62, 0.0, 0.0),
    "gather-scatter": (2960.0, 0.09, 0.17, 0.66, 0.05),
    "all-reduce": (1240.0, 0.19, 0.37, 0.36, 0.03),
    "ring": (1275.0, 0.19, 0.36, 0.38, 0.03),
    "server": (2190.0, 0.12, 0.23, 0.57, 0.04),
    "ddp": (985.0, 0.23, 0.47, 0.20, 0.05),
    "ddp-bf16": (902.0, 0.25, 0.52, 0.10, 0.04),
    "ddp-powersgd(rank=4)": (871.0, 0.26, 0.53, 0.03, 0.03),
}
FORMULAS = {
    "single": (lambda n: 0.0, "0"),
    "gather-scatter": (lambda n: 2.0 * (n - 1), "2(N-1)S"),
    "server": (lambda n: 2.0 * n / 2, "2NS/K"),
    "ddp-bf16": (lambda n: (n - 1) / n, "(N-1)/N*S"),
    "ddp-powersgd(rank=4)": (lambda n: 2 * (n - 1) / n * 0.013, "2(N-1)/N*r*S"),
}


def run(
    strategy: str = "ddp", *, world: int = 4, steps: int = 40, seed: int = 0, step: float | None = None
) -> dict[str, Any]:
    """One finished run."""
    base, forward, backward, exchange, wait = STRATEGIES.get(strategy, STRATEGIES["ddp"])
    base = step if step is not None else base
    noise = random.Random(f"{strategy}{world}{seed}")
    world = 1 if strategy == "single" else world
    series = [base * noise.lognormvariate(0, 0.035) for _ in range(steps)]
    if steps > 30:
        series[27] *= 1.35
    series[0] = base * 1.6 + 900.0 * (world > 1)
    data = random.Random("losses" if world > 1 else "one")  # replicas of one seed see the same losses
    drift = 0.03 if "powersgd" in strategy else 0.0
    loss = [2.3 + 2.2 * math.exp(-i / 9) + data.gauss(0, 0.16) + drift * math.sin(i) for i in range(steps)]
    shares = shares_of(forward, backward, exchange, wait, encode=0.07 if "powersgd" in strategy else 0.0)
    factor, formula = FORMULAS.get(strategy, (lambda n: 2 * (n - 1) / n, "2(N-1)/N*S"))
    theory = factor(world) * S
    return {
        "strategy": strategy,
        "status": "ok",
        "error": None,
        "world_size": world,
        "servers": 2 if strategy == "server" else 0,
        "nodes": world,
        "batch": 256,
        "step_ms": stats.summary(series[1:]),
        "step_ms_series": series,
        "first_step_ms": series[0],
        "startup_ms": {"launch": 1750.0, "build": 310.0, "rendezvous": 240.0 * (world > 1)},
        "loss": loss,
        "test_accuracy": 0.127 if world > 1 else 0.105,
        "train_accuracy": 0.131,
        "peak_memory_bytes": 321_000_000 + 5_000_000 * (world - 1),
        "test_loss": 2.6766,
        "samples_per_s": 256_000 / stats.mean(series[1:] or series),
        "syncs_per_s": 1000 / stats.mean(series[1:] or series),
        "synchronised_bytes": S,
        "wire_bytes_per_step": theory * 1.034,
        "wire": {"measured": world > 1, "theory_bytes": theory, "formula": formula},
        "breakdown": shares,
        "epochs": [{"epoch": 1, "train_s": sum(series) / 1000, "test_s": 3.2, "loss": stats.mean(loss)}],
        "buffer_divergence": 0.0 if strategy.startswith(("ddp", "single")) else 0.0132,
        "ranks": [rank(i, world, series, loss, shares, theory) for i in range(world)],
    }


def rank(
    index: int, world: int, series: list[float], loss: list[float], shares: dict[str, float], theory: float
) -> dict[str, Any]:
    """One rank's figures: rank 3 computes longest, so the others wait."""
    noise = random.Random(f"rank{index}")
    own = [t * (0.94 if index == 0 else 1.0) for t in series]
    late = index == world - 1 and world > 1
    parts = dict(shares)
    moved = parts["wait"] * (0.9 if late else -0.3)
    parts["wait"] -= moved
    parts["backward"] += moved
    return {
        "rank": index,
        "node": index,
        "host": f"node{index}",
        "step_ms": stats.summary(own[1:]),
        "first_step_ms": own[0],
        "loss": [v + noise.gauss(0, 0.3) for v in loss],
        "step_ms_series": own,
        "test_accuracy": 0.127 + 0.0005 * index,
        "train_accuracy": 0.131,
        "peak_memory_bytes": 321_000_000 + 5_000_000 * index,
        "breakdown": parts,
        "wire": {
            "sent": theory / 2 * 1.03,
            "received": theory / 2 * 1.03,
            "theory_sent": theory / 2,
            "theory_received": theory / 2,
            "measured": True,
        },
    }


def shares_of(
    forward: float, backward: float, exchange: float, wait: float, *, encode: float = 0.0
) -> dict[str, float]:
    """Shares that sum to 1."""
    data, update = 0.012, 0.021
    rest = 1 - forward - backward - exchange - wait - encode - data - update
    shares = {"data": data, "forward": forward, "backward": backward, "exposed_encode": encode}
    shares |= {"exposed_exchange": exchange, "wait": wait, "update": update, "between": 0.0, "other": max(rest, 0.0)}
    total = sum(shares.values())
    return {part: shares[part] / total for part in PHASES}


def crashed(strategy: str = "ddp-powersgd(rank=4)", *, steps: int = 0) -> dict[str, Any]:
    """A run that one rank ended."""
    base: dict[str, Any] = {"strategy": strategy, "status": "crashed", "world_size": 4, "nodes": 4}
    if steps:
        partial = run(strategy, steps=steps)
        base |= {key: partial[key] for key in ("loss", "step_ms_series", "first_step_ms")}
    trace = (
        'Traceback (most recent call last):\n  File "train.py", line 71, in step\n    loss.backward()\nRuntimeError: '
    )
    summary = "RuntimeError: [enforce fail] op.preamble.length <= op.nbytes. 2048 vs 1024"
    return base | {"error": {"rank": 2, "summary": summary, "traceback": trace + summary}}


def results(*runs: dict[str, Any], bandwidth: int | None = 1_000_000_000, **extra: Any) -> Results:
    """A whole file around `runs`; without any, the classical comparison."""
    chosen = list(runs) or [run(name) for name in ("single", "gather-scatter", "all-reduce", "ddp")]
    content: Any = {
        "schema": 1,
        "syncline": "0.1.0",
        "created": "2025-02-12T18:15:26+00:00",
        "title": "VGG-11 on four nodes of 1 Gbit/s",
        "config": {"model": "vgg11", "data": {"name": "generated", "size": 32}, "steps": 40, "batch": 256, "seed": 1},
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "platform": "Linux",
            "cpu": "Some CPU",
            "cores": 2,
            "gpu": None,
        },
        "network": {"emulated": bandwidth is not None, "nodes": 4, "bandwidth": bandwidth, "note": None},
        "warnings": [],
        "runs": chosen,
    }
    return content | extra


def scaling(strategy: str = "ddp") -> Results:
    """The scaling study: 1, 2 and 4 ranks, ten epochs each, the first one slow."""
    table = {1: (3.946, 1.640, 0.284), 2: (23.069, 0.890, 0.226), 4: (22.359, 0.502, 0.154)}
    runs = []
    for world, (first, later, test) in table.items():
        one = run(strategy, world=world, steps=240, step=later * 1000 / 24)
        noise = random.Random(world)
        times = [first] + [later * noise.lognormvariate(0, 0.01) for _ in range(9)]
        one["epochs"] = [
            {"epoch": i + 1, "train_s": t, "test_s": test, "loss": 2.0 - i / 10} for i, t in enumerate(times)
        ]
        one["first_step_ms"] = one["step_ms_series"][0] = (first - later) * 1000
        runs.append(one)
    return results(*runs, bandwidth=None, title="CIFAR-10, 1 to 4 GPUs", environment={"cores": 64, "gpu": "8 x A100"})
