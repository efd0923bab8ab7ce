"""Run a command on every node of a cluster, with torchrun's environment variables, until all end or one fails."""

import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, TextIO, cast

from syncline.cluster.gpu import gpu_count, mps_daemon, rank_environment
from syncline.cluster.guard import start_guarded
from syncline.cluster.nodes import Cluster, Node
from syncline.errors import UsageError

MASTER_PORT = 29500  # free in a new namespace
_CHUNK = 65536


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
    with ExitStack() as stack:
        shared = stack.enter_context(mps_daemon()) if devices else {}
        processes = stack.enter_context(_Processes())
        for rank in range(world):
            node = cluster.nodes[rank // nproc_per_node]
            extra = rendezvous(cluster, rank=rank, nproc_per_node=nproc_per_node)
            if devices:
                extra |= shared | rank_environment(rank, node, ranks_on_gpu=-(-world // devices))
            name = f"node {node.index}" if nproc_per_node == 1 else f"node {node.index}, rank {rank}"
            processes.start(command, node=node, name=name, environment=extra)
        return processes.watch()


@dataclass
class _Output:
    """Output stream of one process: writes whole lines, each with the name of the process before it."""

    name: str
    sink: TextIO
    rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        # Progress bars end lines with a carriage return, which would overwrite the lines of other nodes.
        lines = (self.rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self.rest = lines.pop()
        self.write(lines)

    def end(self) -> None:
        self.write([self.rest] if self.rest else [])

    def write(self, lines: list[bytes]) -> None:
        for line in lines:
            self.sink.write(f"[{self.name}] {line.decode(errors='replace')}\n")
        self.sink.flush()


@dataclass
class _Processes:
    """The guarded processes of one run."""

    members: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        """End all that still run. All are asked first, so that they shut down at the same time."""
        self.stop()
        for process in self.members.values():
            process.wait()
        for key in list(self.selector.get_map().values()):
            self._forget(key.fileobj)
        self.selector.close()

    def start(self, command: list[str], *, node: Node, name: str, environment: Mapping[str, str]) -> None:
        process = start_guarded(command, namespace=node.netns, environment=environment, output=subprocess.PIPE)
        self.members[name] = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.selector.register(process.stdout, selectors.EVENT_READ, _Output(name, sys.stdout))
        self.selector.register(process.stderr, selectors.EVENT_READ, _Output(name, sys.stderr))
        self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, name)

    def watch(self) -> int:
        """Forward all output until every process has ended; the first failure ends the others."""
        code = 0
        while self.selector.get_map():
            for key, _ in self.selector.select():
                if isinstance(key.data, _Output):
                    self._read(key)
                    continue
                self._forget(key.fileobj)
                failed = self.members[key.data].wait()
                if failed and not code:
                    # The code is negative if the guard itself was killed by a signal.
                    code = failed if failed > 0 else 128 - failed
                    running = self.stop()
                    rest = f"; ending the other {running}" if running else ""
                    print(f"[{key.data}] failed with exit code {code}{rest}", file=sys.stderr, flush=True)
        return code

    def stop(self) -> int:
        """Ask all running processes to end; returns how many there were."""
        running = [process for process in self.members.values() if process.poll() is None]
        for process in running:
            process.terminate()
        return len(running)

    def _read(self, key: selectors.SelectorKey) -> None:
        chunk = os.read(key.fd, _CHUNK)
        if chunk:
            key.data.feed(chunk)
        else:
            key.data.end()
            self._forget(key.fileobj)

    def _forget(self, source: object) -> None:
        self.selector.unregister(cast(int, source))
        if isinstance(source, int):
            os.close(source)
        else:
            cast(IO[bytes], source).close()
