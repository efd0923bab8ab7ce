"""A control group of the kernel with a memory limit: a process in it that needs more is killed, and only there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox import until

_TOP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2, of version 1
_NO_SWAP = {"memory.swap.max": "0", "memory.swappiness": "0"}


class MemoryLimit:
    """A control group: `wrap` gives the command line that runs a command inside."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def wrap(self, *command: object) -> list[object]:
        """A command line that joins the group and becomes `command`."""
        return ["sh", "-ec", f'echo 0 > {self._folder}/cgroup.procs; exec "$@"', "sh", *command]

    def kills(self) -> int:
        """How many processes of the group the kernel has killed for lack of memory."""
        for name in ("memory.events", "memory.oom_control"):
            if (self._folder / name).exists():
                counts = dict(line.split() for line in (self._folder / name).read_text().splitlines())
                return int(counts["oom_kill"])
        raise AssertionError(f"{self._folder} counts no kills")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryLimit]:
    """A group below this process's own, or below one around it; `OSError` where none can be made."""
    folder = _make(limit_bytes)
    try:
        yield MemoryLimit(folder)
    finally:
        assert until(lambda: not (folder / "cgroup.procs").read_text()), "a process is left in the group"
        folder.rmdir()


def _make(limit_bytes: int) -> Path:
    errors = []
    for parent in _own_groups():
        folder = parent / f"syncline-test-{os.getpid()}"
        try:
            if (parent / "cgroup.subtree_control").exists():
                (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
        except OSError as error:
            errors.append(str(error))
            continue
        try:
            (limit,) = [folder / name for name in _LIMITS if (folder / name).exists()]
            limit.write_text(str(limit_bytes))
            for name, value in _NO_SWAP.items():
                if (folder / name).exists():
                    (folder / name).write_text(value)
        except (OSError, ValueError) as error:
            folder.rmdir()
            errors.append(f"{folder}: {error}")
            continue
        return folder
    raise OSError("; ".join(errors) or "this kernel has no memory groups")


def _own_groups() -> Iterator[Path]:
    """The control group of this process that counts memory, then those around it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        top = _TOP / "memory" if controllers == "memory" else _TOP
        if controllers == "memory" or (not controllers and (_TOP / "cgroup.controllers").exists()):
            inner = top / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top) and folder.is_dir())
