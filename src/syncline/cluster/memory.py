"""Memory of this machine: how much new processes can use, and whether the kernel has ended one for lack of it."""

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_HIGH_PRESSURE = 20.0
"""Percent of the last ten seconds in which a process waited for memory; an idle machine has 0."""


def free_bytes(root: Path = _ROOT) -> int | None:
    """What new processes can use: the machine's available memory, or less in a control group with a limit."""
    room = [kilobytes * 1024 for kilobytes in _values(root / "proc/meminfo", "MemAvailable")]
    for folder in _control_groups(root):
        limits = [*_values(folder / "memory.max"), *_values(folder / "memory.limit_in_bytes")]
        used = [*_values(folder / "memory.current"), *_values(folder / "memory.usage_in_bytes")]
        cache = [*_values(folder / "memory.stat", "inactive_file"), 0]  # the kernel takes it back when it needs it
        if limits and used:
            room.append(max(0, limits[0] - used[0] + cache[0]))
    return min(room, default=None)


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has killed for lack of memory: of this machine and of this control group."""
    files = [root / "proc/vmstat"]
    for folder in _control_groups(root):
        files += [folder / "memory.events", folder / "memory.oom_control"]
    return sum(count for file in files for count in _values(file, "oom_kill"))


def is_short(root: Path = _ROOT) -> bool:
    """Whether processes wait for memory now; daemons (systemd-oomd, earlyoom) then kill some without the kernel."""
    text = _read(root / "proc/pressure/memory")
    found = re.search(r"^some avg10=([\d.]+)", text)
    return found is not None and float(found[1]) > _HIGH_PRESSURE


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control group and of the groups around it, versions 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = top / path.lstrip("/")
        # In a container the path may be the host's, and then only the top is there.
        for folder in dict.fromkeys((inner, *inner.parents, top)):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder


def _values(file: Path, name: str = "") -> list[int]:
    """The number in a file, or the one after `name`; empty if there is none ("max" is no limit)."""
    found = re.search(rf"^{name}:?\s*(\d+)", _read(file), re.MULTILINE)
    return [int(found[1])] if found else []


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
