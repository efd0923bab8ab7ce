"""The (data, pipe) mesh: which rank runs which stage of which replica, its process groups, and shares of a batch."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline.engine.process_groups import forget_groups
from syncline.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """The number of stages of a pipeline, and of replicas of it; ranks of one replica are consecutive."""

    stages: int
    replicas: int

    def __post_init__(self) -> None:
        if self.stages < 1 or self.replicas < 1:
            raise UsageError(f"{self.stages} stages and {self.replicas} replicas: use 1 or more of both")

    def __str__(self) -> str:
        return f"{self.stages}x{self.replicas}"

    @classmethod
    def of(cls, world: int, stages: int) -> "Shape":
        """The shape that keeps every one of `world` ranks busy."""
        if stages < 1 or world % stages:
            raise UsageError(f"{world} ranks cannot form pipelines of {stages} stages: use a divisor of {world}")
        return cls(stages, world // stages)

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, position in the pipeline) of a rank."""
        return divmod(rank, self.stages)

    def rank(self, replica: int, position: int) -> int:
        """The rank at a place."""
        return replica * self.stages + position


def share(count: int, replica: int, replicas: int) -> range:
    """The samples of a global batch that a replica trains on: consecutive, and as many as the others' or one less."""
    base, more = divmod(count, replicas)
    start = replica * base + min(replica, more)
    return range(start, start + base + (replica < more))


def message_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of messages over a group (None: all ranks), from or to tensors on `device`."""
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


class Mesh:
    """The process groups of this rank in a shape: `pipe` (its replica) and `data` (the replicas of its stages).

    All ranks make and close a mesh together.
    """

    def __init__(self, shape: Shape, *, timeout: float) -> None:
        self.shape = shape
        self.replica, self.position = shape.place(dist.get_rank())
        patience = timedelta(seconds=timeout)
        rows = [[shape.rank(r, p) for p in range(shape.stages)] for r in range(shape.replicas)]
        # Every rank makes all groups, in the same order: torch then numbers them, and no name is used twice.
        self.pipe = [dist.new_group(row, timeout=patience) for row in rows][self.replica]
        columns = zip(*rows, strict=True)
        self.data = [dist.new_group(list(column), timeout=patience) for column in columns][self.position]

    def close(self) -> None:
        """Destroy the groups, and those that engines made from them."""
        forget_groups(self.data)
        for group in (self.pipe, self.data):
            dist.destroy_process_group(group)
