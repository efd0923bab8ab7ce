"""Rank functions of the clock tests, in a module so that other processes can import them."""

import time
from datetime import timedelta

import torch.distributed as dist

from syncline.trace.merge.clocks import measure_clocks, with_drift


def measured(rank, world_size):
    """Every rank's view of all clocks, and how long it took."""
    begun = time.perf_counter()
    return measure_clocks(), time.perf_counter() - begun


def shifted(rank, world_size, offset, drift, seconds):
    """Measure rank 1's clock, which is ahead and faster, twice. The clock, and a moment in true and in rank time."""
    start = time.perf_counter_ns()

    def now():
        true = time.perf_counter_ns()
        return true + rank * (offset + round(drift * (true - start)))

    first = measure_clocks(now=now)[rank]
    time.sleep(seconds)
    moment = time.perf_counter_ns(), now()
    last = measure_clocks(now=now)[rank]
    return with_drift(first, last), moment


def in_node(place, store, report):
    """The same for a rank in a node's network namespace."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        first = measure_clocks()[place.rank]
        last = measure_clocks()[place.rank]
        dist.barrier()
        return first, last
    finally:
        dist.destroy_process_group()
