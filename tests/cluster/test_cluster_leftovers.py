"""A cluster leaves nothing behind, however its owner ends."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import marked_processes, until

pytestmark = pytest.mark.namespaces

_OWNER = """
import time
from syncline.cluster import Cluster
cluster = Cluster(2, bandwidth="1Gbit")
print(*(node.netns for node in cluster.nodes), flush=True)
time.sleep(100)
"""

# Three namespaces are all that this user namespace may have, so a second cluster of two nodes and a switch can
# only be made once the kernel has removed every namespace of the first.
_ONE_AT_A_TIME = """
import errno, os, signal, subprocess, sys, time
from pathlib import Path
from syncline.cluster import Cluster, namespaces

def killed_owner():
    code = "from syncline.cluster import Cluster; import os; c = Cluster(2, bandwidth='1Gbit'); os.kill(os.getpid(), 9)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

namespaces.become_namespace_root()
Path("/proc/sys/user/max_net_namespaces").write_text("3")
with Cluster(2):
    refused = killed_owner()
assert refused.returncode == 1 and os.strerror(errno.ENOSPC) in refused.stderr, refused
for attempt in range(3):
    deadline = time.monotonic() + 10
    while killed_owner().returncode != -signal.SIGKILL:
        assert time.monotonic() < deadline, f"namespaces are left after owner {attempt} was killed"
print("removed")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_leaves_nothing(
    number: signal.Signals, program: Callable[..., "subprocess.Popen[str]"]
) -> None:
    owner = program(_OWNER)
    assert owner.stdout is not None
    paths = owner.stdout.readline().split()
    inodes = {Path(path).stat().st_ino for path in paths}
    assert inodes <= visible_namespaces()
    owner.send_signal(number)
    owner.communicate()
    assert owner.returncode in (-number, 130)
    assert marked_processes() == []
    assert not inodes & visible_namespaces()
    assert not any(Path(path).exists() for path in paths)


def test_the_kernel_removed_every_namespace_of_a_killed_owner(
    program: Callable[..., "subprocess.Popen[str]"],
) -> None:
    output, errors = program(_ONE_AT_A_TIME).communicate()
    assert output == "removed\n", errors


def test_the_search_for_leftovers_finds_an_orphan(program: Callable[..., "subprocess.Popen[str]"]) -> None:
    starter = program(
        "import subprocess as s\nprint(s.Popen(['sleep', '100'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    )
    orphan = int(starter.communicate()[0])
    assert marked_processes() == ["sleep 100 "]
    os.kill(orphan, signal.SIGKILL)
    assert until(lambda: marked_processes() == [])


def visible_namespaces() -> set[int]:
    """The inodes of all network namespaces that some process is in or holds open."""
    found = set()
    for pattern in ("[0-9]*/ns/net", "[0-9]*/fd/*"):
        for path in Path("/proc").glob(pattern):
            try:
                if str(path.readlink()).startswith("net:"):
                    found.add(path.stat().st_ino)
            except OSError:
                continue  # it ended while we looked, or is another user's
    return found
