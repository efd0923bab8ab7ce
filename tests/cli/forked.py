"""The command line in a process forked from the tests' forkserver: torch is loaded there, so that it starts at once.

For whatever is about the command and not about the start of an interpreter, which `command.py` has: arguments, output,
exit codes, signals, what is left behind. Not with `--nodes`: an ordinary user's process is started anew for that.
"""

import gc
import multiprocessing.forkserver
import os
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from command import TESTS, Command

from ranks import CONTEXT
from syncline.cluster import ranks as rank_processes


class Forked(Command):
    """A `syncline` process; it and its ranks are found by their working folder, which must be their own."""

    def __init__(self, *args, cwd, **variables):
        assert "--nodes" not in args
        assert "cluster" not in args
        self.cwd = Path(cwd).resolve()
        self._files = [tempfile.NamedTemporaryFile("w+", prefix="syncline-test-") for _ in range(2)]  # noqa: SIM115
        names = [file.name for file in self._files]
        self.process = CONTEXT.Process(target=_main, args=(list(map(str, args)), str(self.cwd), names, variables))
        self.process.start()

    def running(self):
        return self.process.exitcode is None

    def finish(self, timeout=100):
        self.process.join(timeout)
        assert not self.running(), f"it runs for more than {timeout} s"
        self.code = self.process.exitcode
        self.out, self.err = (Path(file.name).read_text() for file in self._files)
        for file in self._files:
            file.close()
        return self

    def wait_for(self, text, timeout=60):
        deadline = time.monotonic() + timeout
        while text not in Path(self._files[0].name).read_text():
            assert time.monotonic() < deadline
            assert self.running(), f"'{text}' never came: {Path(self._files[1].name).read_text()}"
            time.sleep(0.01)

    def _is_ours(self, entry):
        return (entry / "cwd").readlink() == self.cwd


def call(*args, cwd, timeout=100, **variables):
    """Run to the end; nothing may be left."""
    command = Forked(*args, cwd=cwd, **variables).finish(timeout)
    assert command.left() == []
    return command


def launched(*args, ranks, cwd, **variables):
    """The same command as every rank of a launcher's, which torchrun or Slurm would be."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    return [Forked(*args, cwd=cwd, RANK=str(rank), LOCAL_RANK=str(rank), **where) for rank in range(ranks)]


def _main(args, cwd, names, variables):
    gc.freeze()
    os.setsid()
    os.chdir(cwd)
    for descriptor, name in zip((1, 2), names, strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = (open(d, "w", closefd=False) for d in (1, 2))  # noqa: SIM115
    os.environ.update({"COLUMNS": "120", **variables})
    sys.argv, sys.path[:] = ["syncline", *args], [str(TESTS), *sys.path]
    # The ranks come from the same forkserver, which is not this process's child and has another environment.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    rank_processes._main = partial(_rank, variables)
    from syncline.cli.main import main

    main()


def _rank(variables, *args):
    os.environ.update(variables)
    rank_processes._main(*args)
