"""Real Gloo ranks for tests, from one forkserver that has torch loaded: about 0.1 s a test."""

import gc
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CONTEXT = mp.get_context("forkserver")
# What ranks and, in `cli/forked.py`, commands need.
_PRELOAD = ["torch", "torch._dynamo", "syncline.train.rank.worker", "syncline.cli.main", "syncline.cli.train"]
CONTEXT.set_forkserver_preload([*_PRELOAD, "syncline.cli.compare", "syncline.cli.progress", "syncline.report.html"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `function(rank, world_size, *args)` on Gloo ranks; returns every rank's value, in rank order.

    `function` must be importable (module level). The first error of a rank is raised here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pairs = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            CONTEXT.Process(target=_rank, args=(function, rank, world_size, args, folder, pairs[rank][1], timeout))
            for rank in range(world_size)
        ]
        try:
            for process, (_, sender) in zip(processes, pairs, strict=True):
                process.start()
                sender.close()
            return _collect([receiver for receiver, _ in pairs], time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
                process.close()


def run_until_killed(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> None:
    """Run `function` on Gloo ranks; when all have done it, rank 1 is killed with SIGKILL, which ends the run."""
    try:
        run_ranks(_then_killed, world_size, function, *args, timeout=timeout)
    except RuntimeError as error:
        if str(error) != "rank 1 died":
            raise
    else:
        raise AssertionError("rank 1 was not killed")


def _then_killed(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> None:
    import torch.distributed as dist

    function(rank, world_size, *args)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)  # the end of rank 1 ends the run


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = [r for i, r in enumerate(receivers) if i not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(receivers))) - set(results))} did not finish in time")
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                error, value = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            results[rank] = value
    return [results[i] for i in range(len(receivers))]


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], folder: str, sender: Connection,
    timeout: float,
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    gc.freeze()  # a collection would look through all of torch, and copy the memory that the processes share
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    # Most tests are about our own executor: with torch's reducer they would say nothing about it.
    import_module("syncline.engine.attach").START = "overlap"
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        value = function(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        sender.send((None, value))
    except BaseException:
        sender.send((traceback.format_exc(), None))
    finally:
        sender.close()
