"""Several NCCL ranks on one GPU: environment variables for each rank, and a shared CUDA MPS daemon."""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from syncline.cluster.guard import start_guarded
from syncline.cluster.nodes import Node

_CONTROL = "nvidia-cuda-mps-control"
_FOLDER = "syncline-mps-"
_PATIENCE_SECONDS = 10.0


def gpu_count() -> int:
    """Number of NVIDIA GPUs with a device file on this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def rank_environment(rank: int, node: Node, *, ranks_on_gpu: int) -> dict[str, str]:
    """Variables that make NCCL treat emulated nodes as different hosts and use the links between them.

    NCCL refuses two ranks of one host on one GPU, so each rank that shares a GPU gets its own host id.
    """
    return {
        "NCCL_HOSTID": f"host{rank if ranks_on_gpu > 1 else node.index}",
        "NCCL_SOCKET_IFNAME": node.interface,
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
        # An MPS client has 2 by default, and then unrelated streams wait for each other. All clients together have a
        # limit: with 32 each, the fourth got no context.
        "CUDA_DEVICE_MAX_CONNECTIONS": str(64 // max(2, ranks_on_gpu)),
    }


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """A private CUDA MPS daemon: ranks use the GPU at the same time instead of taking turns.

    It gives variables for the ranks. They are empty if the machine has no MPS, or if a daemon is already
    running (the ranks then use that one). The private daemon ends with the block or with this process, even if this
    process is killed.
    """
    control = shutil.which(_CONTROL)
    with ExitStack() as stack:
        yield {} if control is None or _is_running(control, environment={}) else _start(control, stack)


def _start(control: str, stack: ExitStack) -> dict[str, str]:
    """Start a daemon that ends with `stack`; returns the variables for the ranks, none if it did not start."""
    _remove_stale_folders()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=_FOLDER))
    # The lock shows that the folder's owner is alive; the kernel releases it when this process ends.
    lock = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    environment = {}
    for name in ("pipe", "log"):
        Path(folder, name).mkdir()
        environment[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(Path(folder, name))
    daemon = start_guarded([control, "-d"], environment=environment, stay=True)
    stack.callback(_stop, daemon)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _is_running(control, environment=environment):
        if daemon.poll() is not None or time.monotonic() > deadline:
            warnings.warn(f"{_CONTROL} did not start: ranks will take turns on the GPU", stacklevel=4)
            return {}
        time.sleep(0.05)
    stack.callback(_ask, control, "quit", environment=environment)
    return environment


def _stop(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    daemon.wait()


def _ask(control: str, question: str, *, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # noqa: S603 - NVIDIA's program
        [control],
        input=f"{question}\n",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_SECONDS,
    )


def _is_running(control: str, *, environment: Mapping[str, str]) -> bool:
    answer = _ask(control, "get_server_list", environment=environment)
    return answer.returncode == 0 and "cannot find" not in (answer.stdout + answer.stderr).lower()


def _remove_stale_folders() -> None:
    """Remove folders of this user whose owner was killed: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            continue
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        except BlockingIOError:
            pass  # its owner is alive
        finally:
            os.close(lock)
