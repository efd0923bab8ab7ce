"""DDP against Pipe+DDP by number of chunks and batch size: samples per second and memory, without freezing."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from syncline.bench.pipeline.options import Options
from syncline.bench.pipeline.pretrain import arithmetic
from syncline.bench.pipeline.rank import timed
from syncline.bench.training import Options as RankOptions
from syncline.bench.training import joined
from syncline.cluster.ranks import Place, Report
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.mesh import share
from syncline.pipeline.run import Pipeline
from syncline.train.rank.memory import PeakMemory
from syncline.train.workload import build, load_optimizer

_WARM_UP = 2


@dataclass(frozen=True)
class Cell:
    """One line of the table: `stages` 0 is DDP; `chunks` are micro-batches; `batch` is of all ranks together."""

    stages: int
    chunks: int
    batch: int

    @property
    def name(self) -> str:
        """As the table shows it."""
        return "DDP" if not self.stages else f"Pipe+DDP, {self.stages} stages"


def cells(ranks: int, batches: tuple[int, ...]) -> list[Cell]:
    """DDP and pipelines of 2 stages and up, with 1, 2 and 4 chunks per stage."""
    depths = [stages for stages in (2, 4, 8) if stages <= ranks and not ranks % stages]
    found = []
    for batch in batches:
        found.append(Cell(0, 0, batch))
        found += [
            Cell(stages, stages * factor, batch)
            for stages in depths
            for factor in (1, 2, 4)
            if batch // (ranks // stages) >= stages * factor
        ]
    return found


def run_cells(
    place: Place, payload: tuple[RankOptions, str, str, Options, tuple[Cell, ...], int], report: Report
) -> list[dict[str, Any]]:
    """Measure all cells on one rank."""
    ranks, store, _, options, wanted, steps = payload
    with joined(ranks, place, store) as device:
        made = []
        for cell in wanted:
            made.append(_measure(cell, options, steps, device))
            report(f"{cell.name}, {cell.chunks} chunks, batch {cell.batch}: {made[-1]['samples_per_s']:.0f} samples/s")
    return made


def _measure(cell: Cell, options: Options, steps: int, device: torch.device) -> dict[str, Any]:
    memory = PeakMemory(device)
    workload = build(options.model, options.data, seed=0).to(device)
    (phase,) = workload.phases
    optimizer = load_optimizer(options.optimizer, phase.module.parameters())
    pipe = model = None
    if cell.stages:
        pipe = Pipeline(Blocks.of(phase.module), optimizer, stages=cell.stages, micro_batches=cell.chunks)
        mine = pipe.share(cell.batch)
    else:
        model = DistributedDataParallel(phase.module, gradient_as_bucket_view=True)
        mine = share(cell.batch, dist.get_rank(), dist.get_world_size())
    indices = torch.arange(mine.start, mine.stop) % len(workload.train)
    batch = tuple(part.to(device) for part in workload.train.batch(indices))

    def step() -> None:
        with arithmetic(options):
            if pipe is not None:
                pipe.train_batch(batch, total=cell.batch)
            elif model is not None:
                loss = model(*batch)
        if pipe is None:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARM_UP):
        step()
    memory.restart()
    with timed(device) as took:
        for _ in range(steps):
            step()
    if pipe is not None:
        pipe.close()
    return {
        "name": cell.name,
        "stages": cell.stages,
        "chunks": cell.chunks,
        "batch": cell.batch,
        "samples_per_s": cell.batch * steps / took[0],
        "peak_memory_bytes": memory.peak(),
    }
