"""FSDP2 on nodes of two ranks: torch's hybrid sharding, dense and BF16, against `syncline.fsdp`; one rank's part."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from syncline.bench.timing import Clock
from syncline.cluster.ranks import Place, Report
from syncline.integrations import fsdp

HYBRID, HYBRID_BF16, ALONE = "hybrid sharding", "hybrid sharding, BF16 reduce", "without the network"
PER_NODE = 2


@dataclass(frozen=True)
class Options:
    """A transformer on `nodes` x 2 ranks; every round times each way for some steps, one way after the other."""

    nodes: int = 2
    bandwidth: str = "1Gbit"
    device: str = "cpu"
    codecs: tuple[str, ...] = ("bf16", "int8", "int4", "powersgd(rank=16) | bf16")
    layers: int = 6
    width: int = 512
    tokens: int = 8
    """Words of the one sequence that a rank trains on in a step."""
    rounds: int = 4
    steps: int = 4
    threads: int = 1
    seed: int = 0
    loss_steps: int = 40
    """Steps of each training whose losses are compared, on links without a limit."""
    loss_seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def ways(self) -> tuple[str, ...]:
        """The names of all ways: without the network between nodes, torch's two, and ours."""
        return (ALONE, *self.trained)

    @property
    def trained(self) -> tuple[str, ...]:
        """The ways whose replicas train one model: all but the one without the network."""
        return (HYBRID, HYBRID_BF16, "syncline.fsdp", *(f"syncline.fsdp({codec})" for codec in self.codecs))


class _Language(nn.Module):
    """A transformer that predicts the next of 2,000 words."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.words = nn.Embedding(2000, width)
        layer = {"nhead": 8, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, **layer)  # type: ignore[arg-type]
            for _ in range(options.layers)
        )
        self.head = nn.Linear(width, 2000)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden)
        return scores


class Way:
    """One model, sharded and synchronised in one way."""

    def __init__(self, name: str, mesh: DeviceMesh, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.model: Any = _Language(options).to(options.device)
        self.gradient_bytes = sum(4 * p.numel() for p in self.model.parameters())
        inside = mesh if name.startswith("hybrid") else mesh["shard"]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if name == HYBRID_BF16 else None)
        # Parameters stay gathered between forward and backward pass, as people do where the model fits a node.
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=inside, mp_policy=policy, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.sync = None
        if name.startswith("syncline"):
            codec = name.partition("(")[2].removesuffix(")") or None
            self.sync = fsdp.attach(self.model, replicate=mesh["replicate"], compress=codec)
        random = torch.Generator().manual_seed(options.seed + dist.get_rank())
        starts = torch.randint(0, 2000, (64,), generator=random)
        rows = [((start + torch.arange(options.tokens + 1)) % 2000)[None] for start in starts]
        self.batches = [row.to(options.device) for row in rows]
        self.losses: list[float] = []

    def step(self) -> None:
        """One training step."""
        words = self.batches[len(self.losses) % len(self.batches)]
        loss = nn.functional.cross_entropy(self.model(words[:, :-1])[0], words[0, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def rank_main(place: Place, options: Options, report: Report) -> dict[str, Any]:
    """Time every way in every round; returns milliseconds per step by way, and losses."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    mesh = init_device_mesh(options.device, (options.nodes, PER_NODE), mesh_dim_names=("replicate", "shard"))
    ways = {name: Way(name, mesh, options) for name in options.ways}
    clock, times = Clock(device), {name: list[float]() for name in ways}
    for number in range(options.rounds + 1):  # the first one is warm-up
        for name, way in list(ways.items())[:: -1 if number % 2 else 1]:
            dist.barrier()
            began = clock.mark()
            for _ in range(options.steps):
                way.step()
            dist.barrier()
            if number:
                times[name].append(clock.between(began, clock.mark()) / options.steps)
        report(f"round {number} of {options.rounds}")
    losses = {name: way.losses for name, way in ways.items()}
    size = ways[HYBRID].gradient_bytes
    for way in ways.values():
        if way.sync is not None:
            way.sync.close()
    return {"times": times, "losses": losses, "gradient_bytes": size}


def train_main(place: Place, options: Options, report: Report) -> dict[str, list[list[float]]]:
    """Train every way from every seed; returns the losses of all steps, by way and seed."""
    torch.set_num_threads(options.threads)
    mesh = init_device_mesh(options.device, (options.nodes, PER_NODE), mesh_dim_names=("replicate", "shard"))
    losses: dict[str, list[list[float]]] = {name: [] for name in options.trained}
    for seed in options.loss_seeds:
        for name, of_seeds in losses.items():
            way = Way(name, mesh, replace(options, seed=seed))
            for _ in range(options.loss_steps):
                way.step()
            if way.sync is not None:
                way.sync.close()
            of_seeds.append(way.losses)
            report(f"seed {seed}, {name}: loss {way.losses[-1]:.3f}")
    return losses
