"""Rank processes for tests: each obeys commands over a pipe, and the test may kill or stop it at any time."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import CONTEXT

PERIOD = 0.1  # seconds between heartbeats


class Rank:
    """One rank's process, as the test sees it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    def tell(self, command: str, *args: Any) -> None:
        """Give a command and do not wait."""
        self.pipe.send((command, args))

    def hear(self, timeout: float = 20) -> Any:
        """The answer to the oldest command that was not heard yet."""
        if not self.pipe.poll(timeout):
            raise TimeoutError("the rank did not answer")
        return self.pipe.recv()

    def ask(self, command: str, *args: Any) -> Any:
        """Give a command and wait for its answer."""
        self.tell(command, *args)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, and proof that it worked."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)
        assert self.process.exitcode == -signal.SIGKILL

    def stop(self) -> None:
        """SIGSTOP, and proof that it worked."""
        os.kill(self.process.pid, signal.SIGSTOP)
        until = time.monotonic() + 5
        while (state := process_letter(self.process.pid)) != "T":
            assert time.monotonic() < until, state
            time.sleep(0.005)


def process_letter(pid: int) -> str:
    """The state of a process as /proc tells it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def ranks(world: int, *, tcp: bool = False, apart: bool = False, gloo: bool = False, **options: Any) -> Iterator[Any]:
    """Ranks with a started `Peers` each; `tcp`: rank 0 serves the store; `apart`: as if every rank had a machine."""
    with tempfile.TemporaryDirectory() as folder:
        made = []
        try:
            for rank in range(world):
                pipe, theirs = CONTEXT.Pipe()
                args = (rank, world, folder if not tcp else None, theirs, apart, gloo, options)
                process = CONTEXT.Process(target=_rank, args=args)
                process.start()
                theirs.close()
                made.append(Rank(process, pipe))
            if tcp:
                port = made[0].hear(60)
                for rank in made[1:]:
                    rank.pipe.send(port)
            assert [rank.hear(60) for rank in made] == ["ready"] * world
            yield made
        finally:
            for rank in made:
                rank.process.kill()
                rank.process.join()
                rank.process.close()
                rank.pipe.close()


def _rank(
    rank: int, world: int, folder: str | None, pipe: Connection, apart: bool, gloo: bool, options: dict[str, Any]
) -> None:  # fmt: skip
    import torch.distributed as dist

    from syncline.engine.health.peers import Peers

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if folder:
        store = dist.FileStore(str(Path(folder) / "store"), world)
    else:
        port = 0 if rank == 0 else pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False)
        if rank == 0:
            pipe.send(store.port)
    if gloo:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=3))
    peers = Peers(store, rank=rank, world=world, **{"timeout": 3.0, "period": PERIOD, **options})
    if apart:
        peers._own = replace(peers._own, machine=f"machine {rank}")
    peers.start()
    until = time.monotonic() + 40
    while len(peers._processes) < world - 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    pipe.send("ready")
    while True:
        command, args = pipe.recv()
        pipe.send(globals()[f"_do_{command}"](peers, pipe, *args))


def _do_doing(peers: Any, pipe: Connection, text: str) -> None:
    peers.doing = text
    time.sleep(2 * peers._period)  # until it is written


def _do_explain(peers: Any, pipe: Connection, *args: Any) -> tuple[str, tuple[int, ...], float]:
    begin = time.monotonic()
    error = peers.explain("unit 'fc1' of step 12", *args)
    return str(error), error.ranks, time.monotonic() - begin


def _do_all_reduce(peers: Any, pipe: Connection) -> tuple[str, tuple[int, ...], float]:
    import torch
    import torch.distributed as dist

    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        return _do_explain(peers, pipe, error)
    raise AssertionError("the exchange did not fail")


def _do_alarm_text(peers: Any, pipe: Connection, seconds: float) -> str | None:
    until = time.monotonic() + seconds
    while peers.alarm_text() is None and time.monotonic() < until:
        time.sleep(0.01)
    return peers.alarm_text()


def _do_sleep(peers: Any, pipe: Connection, seconds: float) -> None:
    pipe.send("sleeping")
    time.sleep(seconds)


def _do_leave(peers: Any, pipe: Connection, *reason: Any) -> None:
    peers.leave(*reason)


def _do_close(peers: Any, pipe: Connection) -> float:
    begin = time.monotonic()
    peers.close()
    return time.monotonic() - begin
