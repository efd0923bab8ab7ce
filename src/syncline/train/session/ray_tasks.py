"""Tasks of `compare --launcher ray` on the nodes of a Ray cluster: one rank, a free port, removing a folder."""

import fcntl
import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from syncline.cluster.guard import start_guarded

_LAST_LINES = 20
_SIOCGIFADDR = 0x8915


def find_port() -> tuple[str, int]:
    """The address of this node, and a free port on it."""
    import ray

    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as server:
        return address, server.getsockname()[1]


def rank_main(command: list[str], variables: dict[str, str], folder: str) -> Iterator[dict[str, Any]]:
    """Run the command as one rank; yields lines of its output, and at the end its exit code and its files."""
    import ray

    interface = interface_of(ray.util.get_node_ip_address())
    # Gloo would look for its interface by the name of the host, which often means the loopback.
    found = {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface}
    environment = {**found, **{name: os.environ[name] for name in found if name in os.environ}, **variables}
    process = start_guarded([sys.executable, *command], environment=environment, output=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        # Standard output is the JSON of the results, which are among the files.
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        last: deque[str] = deque(maxlen=_LAST_LINES)
        for line in io.TextIOWrapper(process.stderr, errors="replace"):
            last.append(line.rstrip("\n"))
            yield {"line": last[-1]}
        code = process.wait()
        drain.join()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    yield {"code": code, "files": packed(Path(folder) / "run", int(variables["RANK"])), "errors": list(last)}


def packed(folder: Path, rank: int) -> bytes:
    """Rank 0's whole run folder as a tar archive, or the logs of another rank."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (rank == 0 or path.name.startswith(f"rank{rank}.")):
                archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return content.getvalue()


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(query, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def remove_folder(folder: str) -> None:
    """Remove what `rank_main` left."""
    shutil.rmtree(folder, ignore_errors=True)
