"""Measure the real bandwidth of a link with one TCP stream between two nodes."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

from syncline.cluster.nodes import Cluster, Node, enter
from syncline.errors import UsageError

_CHUNK = 1 << 20
_WARM_UP_SECONDS = 0.3  # until TCP's slow start and the shaper's burst are over
_TIMEOUT_SECONDS = 10.0


def measure_bandwidth(cluster: Cluster, *, source: int = 0, target: int = 1, seconds: float = 1.0) -> float:
    """Payload bits per second of a TCP stream from node `source` to node `target`.

    Headers take about 4.4%, so a link of 1 Gbit/s shows at most 956 Mbit/s.
    """
    last = len(cluster.nodes) - 1
    if source == target or not (0 <= source <= last and 0 <= target <= last):
        raise UsageError(f"cannot measure from node {source} to node {target}: name two of the nodes 0 to {last}")
    # Each end needs a thread of its own, because entering a namespace moves the whole thread.
    with ThreadPoolExecutor(max_workers=2) as pool, pool.submit(_listen, cluster.nodes[target]).result() as server:
        sending = pool.submit(_send, cluster.nodes[source], server.getsockname())
        measured = pool.submit(_receive, server, seconds)
        sending.result()
        return measured.result()


def _listen(node: Node) -> socket.socket:
    enter(node)
    server = socket.create_server((node.address, 0))
    server.settimeout(_TIMEOUT_SECONDS)
    return server


def _send(node: Node, address: tuple[str, int]) -> None:
    enter(node)
    payload = bytes(_CHUNK)
    with socket.create_connection(address, timeout=_TIMEOUT_SECONDS) as stream:
        while True:
            try:
                stream.sendall(payload)
            except (BrokenPipeError, ConnectionResetError):
                return  # the receiver has finished measuring


def _receive(server: socket.socket, seconds: float) -> float:
    buffer = bytearray(_CHUNK)
    stream, _ = server.accept()
    with stream:
        stream.settimeout(_TIMEOUT_SECONDS)
        _drain(stream, buffer, _WARM_UP_SECONDS)
        received, elapsed = _drain(stream, buffer, seconds)
    return received * 8 / elapsed


def _drain(stream: socket.socket, buffer: bytearray, seconds: float) -> tuple[int, float]:
    received = 0
    start = now = time.perf_counter()
    while now < start + seconds:
        count = stream.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender ended before the measurement did")
        received += count
        now = time.perf_counter()
    return received, now - start
