"""Joining the other ranks: the device of a rank, its process group, and its clock against rank 0's."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline._compat.groups import Store, new_group
from syncline.errors import UsageError
from syncline.trace.merge.clocks import Clock, measure_clocks, with_drift


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of `train.device`: ranks share the machine's GPUs in turn."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name, option="--set train.device=")
    if name == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def check_device(name: str, *, option: str) -> None:
    """Refuse a device that this machine does not have; `option` is how the user names one."""
    if name not in ("cpu", "cuda"):
        raise UsageError(f"unknown device '{name}': use {option}cpu or {option}cuda")
    if name == "cuda" and not torch.cuda.is_available():
        why = "torch finds no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise UsageError(f"there is no device 'cuda' here ({why}): use {option}cpu")


@contextmanager
def join_workers(
    store: Store, device: torch.device, *, rank: int, workers: int, servers: int, timeout_s: float
) -> Iterator[dist.ProcessGroup | None]:
    """The process group of the workers; aggregators, if any, are members of the default group only."""
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=workers + servers,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if cuda else None,
    )
    try:
        yield dist.new_group(list(range(workers))) if servers else dist.group.WORLD
        dist.barrier()  # a rank that leaves early would close connections that others still use
    finally:
        dist.destroy_process_group()


class ClockMeasurement:
    """Measures this rank's clock against rank 0's at the start and the end of a run; all ranks take part."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._first: Clock | None = None
        if not dist.is_initialized():
            return
        if dist.get_backend() != "gloo":
            ranks = range(dist.get_world_size())
            self._group = new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._first = self._measure()

    def finish(self) -> Clock | None:
        """Measure again; the clock with its drift, or None for a rank that is alone."""
        return None if self._first is None else with_drift(self._first, self._measure())

    def _measure(self) -> Clock:
        return measure_clocks(self._group)[dist.get_rank()]
