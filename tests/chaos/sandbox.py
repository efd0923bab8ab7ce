"""A sandbox for commands under faults: own processes, mounts, network, shared memory and temporary folder.

Whatever a command leaves behind is found by looking into the sandbox, and ends with it. Nothing reaches the machine.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
TEMPORARY = "/mnt"
"""The temporary folder of commands in a sandbox; it is a file system of its own."""
_LISTENING = "0A"


class Sandbox:
    """Namespaces that live as long as their first process, which ends with this object or this test process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        spaces = ["--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        first = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_init.py")), TEMPORARY]
        self._unshare = subprocess.Popen(
            ["unshare", *own_user, *spaces, *first], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n", "the sandbox did not start"
        unshare = self._unshare.pid
        self.pid = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text())
        self._processes = Path(f"/proc/{self.pid}/ns/pid").readlink()
        self._enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", f"--wdns={folder}"]
        self._enter += ["--user", "--preserve-credentials"] if own_user else []

    def start(self, *command: object, **variables: str) -> "Running":
        """Start a command in the sandbox; its output goes to files."""
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": paths, "TMPDIR": TEMPORARY, "COLUMNS": "120", **variables}
        return Running([*self._enter, *map(str, command)], environment)

    def syncline(self, *args: object, **variables: str) -> "Running":
        """Start the command line."""
        return self.start(sys.executable, "-m", "syncline", *args, **variables)

    def shell(self, text: str) -> str:
        """Run a line of shell in the sandbox; it must succeed."""
        done = self.start("sh", "-ec", text).finish(30)
        assert done.code == 0, f"{text}: {done.err}"
        return done.out

    def path(self, path: Path | str) -> Path:
        """A path of the sandbox, with its mounts, as the test sees it."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def processes(self) -> dict[int, str]:
        """All living processes of the sandbox but its first: the machine's number and the command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                inside = (entry / "ns/pid").readlink() == self._processes and int(entry.name) != self.pid
                if inside and process_letter(int(entry.name)) not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended while we looked
        return found

    def left_behind(self, patience: float = 10.0) -> dict[str, list[str]]:
        """Processes, shared memory, temporary files, listening ports and namespaces; empty after a clean end."""
        until(lambda: not self.processes(), seconds=patience)
        found = {
            "processes": list(self.processes().values()),
            "shared memory": [p.name for p in self.path("/dev/shm").iterdir()],
            # torch keeps the cache of its compiler there, on purpose.
            "temporary files": [p.name for p in self.path(TEMPORARY).iterdir() if "torchinductor" not in p.name],
            "ports": self._ports(),
            # A namespace without a process lives only in a mount of its file.
            "namespaces": [line for line in self._mounts() if " - nsfs " in line],
        }
        return {kind: names for kind, names in found.items() if names}

    def _mounts(self) -> list[str]:
        return Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()

    def _ports(self) -> list[str]:
        rows = [row.split() for row in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
        return [row[1] for row in rows if row[3] == _LISTENING]

    def close(self) -> None:
        """End everything in the sandbox."""
        assert self._unshare.stdin is not None
        assert self._unshare.stdout is not None
        self._unshare.stdin.close()
        self._unshare.wait()
        self._unshare.stdout.close()


class Running:
    """A command in a sandbox."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        self.out, self.err, self.code = "", "", None
        self.ended_at = 0.0

    @property
    def pid(self) -> int:
        """The machine's number of the command itself; nsenter is its parent."""
        outer = self._process.pid
        path = Path(f"/proc/{outer}/task/{outer}/children")
        assert until(lambda: bool(path.read_text().split()), seconds=5)
        return int(path.read_text().split()[0])

    def go_on(self) -> None:
        """SIGCONT after SIGSTOP, also to nsenter, which stops itself when its child stops."""
        for pid in (self.pid, self._process.pid):
            os.kill(pid, signal.SIGCONT)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def finish(self, timeout: float = 250) -> "Running":
        """Wait for its end; then `code`, `out` and `err` are set."""
        self.out, self.err = self._process.communicate(timeout=timeout)
        self.code, self.ended_at = self._process.returncode, time.monotonic()
        return self


@contextmanager
def sandbox(folder: Path) -> Iterator[Sandbox]:
    """A sandbox that is closed at the end; commands start in `folder`."""
    made = Sandbox(folder)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def folder_of_this_process() -> Iterator[str]:
    """A temporary folder for forked ranks. A TemporaryDirectory would be removed by the first rank that ends."""
    owner, folder = os.getpid(), tempfile.mkdtemp()
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder)


def process_letter(pid: int) -> str:
    """The state of a process as /proc tells it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], Any], *, seconds: float = 10.0) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, and prove that it arrived: the process is stopped or ends."""
    os.kill(pid, number)
    letters = "T" if number == signal.SIGSTOP else "ZX"

    def arrived() -> bool:
        try:
            return process_letter(pid) in letters
        except FileNotFoundError:
            return number != signal.SIGSTOP

    assert until(arrived, seconds=10), f"{number.name} had no effect"
