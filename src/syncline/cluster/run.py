"""Run a command on every node of a cluster, with torchrun's environment variables, until all end or one fails."""

import io
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import IO, TextIO, cast

from syncline.cluster.gpu import gpu_count, mps_daemon, rank_environment
from syncline.cluster.guard import start_guarded
from syncline.cluster.nodes import Cluster
from syncline.errors import UsageError

MASTER_PORT = 29500  # free in a new namespace


def rendezvous(cluster: Cluster, *, rank: int, nproc_per_node: int = 1) -> dict[str, str]:
    """Environment variables by which rank `rank` finds the others; named as torchrun names them."""
    node = cluster.nodes[rank // nproc_per_node]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(cluster.nodes) * nproc_per_node),
        "LOCAL_RANK": str(rank % nproc_per_node),
        "LOCAL_WORLD_SIZE": str(nproc_per_node),
        "GROUP_RANK": str(node.index),
        "NODE_RANK": str(node.index),
        "GROUP_WORLD_SIZE": str(len(cluster.nodes)),
        "NNODES": str(len(cluster.nodes)),
        "MASTER_ADDR": cluster.nodes[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        "SYNCLINE_NODE": str(node.index),
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
    }


def run_on_nodes(cluster: Cluster, command: list[str], *, nproc_per_node: int = 1, gpu: bool | None = None) -> int:
    """Run `command` on every node; returns 0, or the exit code of the first process that failed.

    A failure ends the other processes. Every line of output begins with the node that wrote it. `gpu` (default: whether
    there is one) prepares several NCCL ranks on one GPU. No process of the command outlives this call or this process.
    """
    if not command:
        raise UsageError("no command to run: write it after '--'")
    if shutil.which(command[0]) is None:
        raise UsageError(f"cannot run '{command[0]}': no such program; give its path, or fix PATH")
    if nproc_per_node < 1:
        raise UsageError(f"{nproc_per_node} processes per node make no sense: choose 1 or more")
    world = len(cluster.nodes) * nproc_per_node
    devices = gpu_count() if gpu is None else max(1, gpu_count()) if gpu else 0
    ended: SimpleQueue[tuple[str, int]] = SimpleQueue()
    with ExitStack() as stack:
        shared = stack.enter_context(mps_daemon()) if devices else {}
        readers = stack.enter_context(ThreadPoolExecutor(max_workers=2 * world))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, processes)
        for rank in range(world):
            node = cluster.nodes[rank // nproc_per_node]
            extra = rendezvous(cluster, rank=rank, nproc_per_node=nproc_per_node)
            if devices:
                extra |= shared | rank_environment(rank, node, ranks_on_gpu=-(-world // devices))
            name = f"node {node.index}" if nproc_per_node == 1 else f"node {node.index}, rank {rank}"
            process = start_guarded(command, namespace=node.netns, environment=extra, output=subprocess.PIPE)
            processes.append(process)
            readers.submit(_forward, name, process.stdout, sys.stdout)
            readers.submit(_forward_to_the_end, name, process, ended)
        return _watch(processes, ended)


def _watch(processes: "list[subprocess.Popen[bytes]]", ended: "SimpleQueue[tuple[str, int]]") -> int:
    """Wait until every process has ended; the first failure ends the others."""
    code = 0
    for _ in processes:
        name, failed = _next(ended)
        if failed and not code:
            # The code is negative if the guard itself was killed by a signal.
            code = failed if failed > 0 else 128 - failed
            running = _stop(processes)
            rest = f"; ending the other {running}" if running else ""
            print(f"[{name}] failed with exit code {code}{rest}", file=sys.stderr, flush=True)
    return code


def _next(ended: "SimpleQueue[tuple[str, int]]") -> tuple[str, int]:
    while True:
        with suppress(Empty):
            # A signal may wake another thread than this one, which alone can handle it: so wake up regularly.
            return ended.get(timeout=0.2)


def _stop(processes: "list[subprocess.Popen[bytes]]") -> int:
    """Ask all running processes to end, so that they shut down at the same time; returns how many there were."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    return len(running)


def _forward_to_the_end(name: str, process: "subprocess.Popen[bytes]", ended: "SimpleQueue[tuple[str, int]]") -> None:
    """Forward the errors of a process, wait until it has ended, and report its exit code."""
    try:
        _forward(name, process.stderr, sys.stderr)
    finally:
        ended.put((name, process.wait()))


def _forward(name: str, source: IO[bytes] | None, sink: TextIO) -> None:
    """Write each line of a process with its name before it. Progress bars end lines with a carriage return, too."""
    assert source is not None
    with io.TextIOWrapper(cast(io.BufferedReader, source), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            sink.write(f"[{name}] {line.removesuffix(chr(10))}\n")
            sink.flush()
