"""The cases of `bench causes`: the cause, the loop, where and how strong, all drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

LOOPS = ("ddp", "attach", "fsdp", "gan")
"""DDP with BatchNorm, `syncline.attach`, FSDP2, and a GAN of two DDP models with an optimizer each."""


@dataclass(frozen=True)
class Case:
    """One scripted run: a loop that is recorded with a cause of slowness and without it, in the same processes."""

    number: int
    cause: str
    loop: str
    device: str = "cpu"
    ranks: int = 2
    nodes: int = 0
    """Emulated nodes with ranks on them in order; 0: all ranks on this machine."""
    late: tuple[int, ...] = ()
    """The ranks that are delayed."""
    where: str = ""
    """The place in the loop, or on a GPU the kind of host work or synchronisation."""
    ms: float = 0.0
    """The delay per step; on a GPU, the host work per layer."""
    bandwidth: str = ""
    """Of the links while the cause is on."""
    megabytes: float = 0.05
    """Bytes of the parameters, about."""
    tensors: int = 0
    """Additional small parameters, each a message of its own while the cause is on."""
    workers: int = 0
    """Processes that need a core each while the cause is on, such as a loader's workers."""
    told: bool = True
    """Whether the recorder is given the models and optimizers; otherwise it finds them."""
    steps: int = 14
    seed: int = 0


@dataclass(frozen=True)
class Cause:
    """A kind of cause: the verdicts that are right, the device that shows it, and what is drawn for a case."""

    name: str
    kinds: tuple[str, ...]
    device: str
    draw: Callable[[Random, str], dict[str, Any]]


CAUSES: dict[str, Cause] = {}


def _cause(name: str, *kinds: str, device: str = "cpu") -> Callable[..., Any]:
    def register(draw: Callable[[Random, str], dict[str, Any]]) -> Callable[..., Any]:
        CAUSES[name] = Cause(name, kinds, device, draw)
        return draw

    return register


@_cause("straggler", "straggler")
def _straggler(random: Random, loop: str) -> dict[str, Any]:
    ranks = random.choice((2, 2, 3))
    where = random.choice(("forward", "backward", "data", "update", "between"))
    return {"ranks": ranks, "late": (random.randrange(ranks),), "where": where, "ms": random.uniform(90, 200)}


@_cause("slow node", "straggler")
def _slow_node(random: Random, loop: str) -> dict[str, Any]:
    late = random.choice(((0, 1), (2, 3)))
    where = random.choice(("forward", "backward"))
    return {"ranks": 4, "nodes": 2, "late": late, "where": where, "ms": random.uniform(110, 220)}


@_cause("slow link", "bandwidth-bound")
def _slow_link(random: Random, loop: str) -> dict[str, Any]:
    megabits, ms = random.choice((50, 100, 200)), random.uniform(120, 250)
    # How often the parameters cross the link in a step.
    passes = {"fsdp": 4, "gan": 2}.get(loop, 1)
    size = megabits / 8 * ms / 1e3 / passes
    return {"nodes": 2, "bandwidth": f"{megabits}Mbit", "ms": ms, "megabytes": size}


@_cause("slow loader", "input-bound")
def _slow_loader(random: Random, loop: str) -> dict[str, Any]:
    ranks = random.choice((2, 2, 3))
    return {"ranks": ranks, "late": tuple(range(ranks)), "where": "data", "ms": random.uniform(90, 200)}


@_cause("oversubscription", "oversubscribed")
def _oversubscription(random: Random, loop: str) -> dict[str, Any]:
    return {"workers": random.randrange(8, 15), "ms": random.uniform(20, 40)}


@_cause("small buckets", "latency-bound")
def _small_buckets(random: Random, loop: str) -> dict[str, Any]:
    # FSDP gathers a parameter twice, and once more scatters its gradient.
    return {"nodes": 2, "tensors": random.randrange(200, 400) // (4 if loop == "fsdp" else 1)}


@_cause("host-bound", "host-bound", device="cuda")
def _host_bound(random: Random, loop: str) -> dict[str, Any]:
    return {"ranks": 1, "where": random.choice(("python", "launches")), "ms": random.uniform(8, 14), "steps": 5}


@_cause("sync points", "sync-bound", device="cuda")
def _sync_points(random: Random, loop: str) -> dict[str, Any]:
    where = random.choice(("item", "copy", "synchronize"))
    return {"ranks": 1, "where": where, "ms": random.uniform(1.5, 2.5), "steps": 8}


def cases(runs: int, *, seed: int, device: str) -> list[Case]:
    """As many cases as asked for: all pairs of a cause and a loop in turn, each time with other values."""
    pairs = list(product([cause for cause in CAUSES.values() if cause.device == device], LOOPS))
    made = []
    for number in range(runs):
        cause, loop = pairs[number % len(pairs)]
        random = Random(f"{seed} {device} {number}")
        told = random.random() < 0.5 if loop == "gan" else True
        drawn = cause.draw(random, loop)
        made.append(Case(number, cause.name, loop, device=device, told=told, seed=random.randrange(1 << 30), **drawn))
    return made
