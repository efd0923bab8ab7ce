"""Linux namespace calls that Python 3.11 lacks: `unshare`, `setns`, and root in a new user namespace.

Also a small program. It imports nothing from Syncline, so it can run by its path before any thread exists:
`python namespaces.py --check` tries what a cluster needs; `python namespaces.py CMD...` runs CMD as that root.
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces of the kinds in `flags`."""
    _checked(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Move the calling thread into the namespace that `descriptor` is open on."""
    _checked(_libc.setns(descriptor, kind), "setns")


def open_current_network() -> int:
    """A descriptor of the calling thread's network namespace; the namespace exists while the descriptor is open."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def is_privileged() -> bool:
    """Whether this process may create network namespaces and links (as root, or in its own user namespace)."""
    for line in Path("/proc/thread-self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return bool(effective >> _CAP_NET_ADMIN & 1 and effective >> _CAP_SYS_ADMIN & 1)
    return False


def thread_count() -> int:
    """Number of threads of this process, including those of native libraries."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def become_namespace_root() -> None:
    """Make this single-threaded process root of a new user namespace; its files keep their owner."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    # The kernel requires setgroups to be denied before an ordinary user may map a group.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _checked(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def _main(arguments: list[str]) -> None:
    if not is_privileged():
        become_namespace_root()
    if arguments == ["--check"]:
        unshare(CLONE_NEWNET)
    else:
        os.execv(arguments[0], arguments)  # noqa: S606 - no shell needed


if __name__ == "__main__":
    try:
        _main(sys.argv[1:])
    except OSError as error:
        sys.exit(str(error))
