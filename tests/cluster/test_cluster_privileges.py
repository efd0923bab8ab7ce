"""An ordinary user gets nodes through a user namespace, and still owns the files that are written."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import syncline
from syncline.cluster import ensure_privileges, namespaces, privileges
from syncline.errors import UsageError

pytestmark = pytest.mark.namespaces

_NOBODY = 65534

_CLUSTER = """
import json
import os
from pathlib import Path
from syncline.cluster import Cluster, ensure_privileges
from syncline.cluster.capabilities import capabilities
from syncline.cluster.measure import measure_bandwidth
print(os.geteuid(), capabilities().how)
ensure_privileges()
ensure_privileges()
with Cluster(2, bandwidth="100Mbit") as cluster:
    print(50e6 < measure_bandwidth(cluster, seconds=0.3) < 110e6)
Path("mine").write_text("x")
"""

_TOOL = """
import os, sys, threading
from pathlib import Path
from syncline.cluster import Cluster, ensure_privileges
from syncline.cluster.run import run_on_nodes
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as torch does when it is imported
try:
    ensure_privileges(reexec="again" in sys.argv)
except ValueError as error:
    sys.exit(f"refused: {error}")
with Path("starts").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
with Cluster(2) as cluster:
    sys.exit(run_on_nodes(cluster, ["sh", "-c", "id -u; touch rank$RANK"]))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that belongs to an ordinary user."""
    if os.geteuid() == 0 and not maps_nobody():
        pytest.skip("an earlier test has made this ordinary user's process root of a user namespace")
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        yield Path(folder)


def maps_nobody() -> bool:
    """Whether this user namespace knows `nobody`; the one that a cluster makes knows a single user."""
    ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= _NOBODY < first + count for first, _, count in ranges)


def as_ordinary_user(text: str, *arguments: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """Run a Python text as `nobody`, or as ourselves where we are an ordinary user already."""
    file = home / "program.py"
    file.write_text(text)
    command = [sys.executable, str(file), *arguments]
    if os.geteuid() == 0:
        drop = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--bounding-set=-all"]
        command = ["unshare", "--mount", "sh", "-ec", f"{_open_the_way()}\nexec {shlex.join([*drop, *command])}"]
    environment = {**os.environ, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)


def _open_the_way() -> str:
    """Shell lines that show an interpreter inside a closed folder (root's home), in a mount namespace alone."""
    needed = {Path(sys.base_prefix), Path(sys.prefix), Path(syncline.__file__).parent.parent}
    closed = {folder for path in needed for folder in path.parents if not folder.stat().st_mode & 0o001}
    lines = []
    for folder in closed:
        inside = [str(path) for path in needed if path.is_relative_to(folder)]
        lines += ["hold=$(mktemp -d)", "mount -t tmpfs -o mode=755 tmpfs $hold"]
        for number, path in enumerate(inside):
            lines += [f"mkdir $hold/{number}", f"mount --bind {shlex.quote(path)} $hold/{number}"]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(folder))}")
        for number, path in enumerate(inside):
            quoted = shlex.quote(path)
            lines += [f"mkdir -p {quoted}", f"mount --bind $hold/{number} {quoted}"]
        lines += ["umount -R $hold", "rmdir $hold"]
    return "\n".join(lines)


def test_an_ordinary_user_makes_a_shaped_cluster_and_owns_the_files(home: Path) -> None:
    result = as_ordinary_user(_CLUSTER, home=home)
    user = _NOBODY if os.geteuid() == 0 else os.geteuid()
    assert result.stdout.splitlines() == [f"{user} userns", "True"], result.stderr
    assert (home / "mine").stat().st_uid == user


def test_a_tool_with_threads_restarts_itself_once(home: Path) -> None:
    result = as_ordinary_user(_TOOL, "again", "a b", home=home)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[node 0] 0", "[node 1] 0"]
    assert (home / "starts").read_text() == "again a b\n"
    user = _NOBODY if os.geteuid() == 0 else os.geteuid()
    assert {(home / f"rank{rank}").stat().st_uid for rank in range(2)} == {user}


def test_a_library_with_threads_is_told_what_to_do(home: Path) -> None:
    result = as_ordinary_user(_TOOL, home=home)
    assert result.returncode == 1
    assert "refused: this process has threads already" in result.stderr
    assert not (home / "starts").exists()


def test_root_stays_unchanged() -> None:
    if not namespaces.is_privileged():
        pytest.skip("only root has nothing to do")
    before = Path("/proc/self/ns/user").readlink()
    ensure_privileges()
    assert Path("/proc/self/ns/user").readlink() == before


def test_a_process_stays_unchanged_if_the_kernel_allows_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused() -> str:
        asked.append(True)
        return "neither root nor a user namespace is available here (unshare: Operation not permitted)"

    monkeypatch.setattr(namespaces, "is_privileged", lambda: False)
    monkeypatch.setattr(privileges, "why_impossible", refused)
    before = Path("/proc/self/ns/user").readlink()
    with pytest.raises(UsageError, match="run as root, or allow unprivileged user namespaces"):
        ensure_privileges()
    assert asked == [True]
    assert Path("/proc/self/ns/user").readlink() == before


@pytest.mark.full
def test_an_ordinary_user_compares_on_emulated_nodes_and_owns_the_run(home: Path) -> None:
    arguments = ["compare", "--strategies", "all-reduce", "--model", "mlp(hidden=16)", "--nodes", "2", "--bandwidth"]
    arguments += ["1Gbit", "--batch", "8", "--steps", "3", "--set", "train.test_samples=0", "--out", "run"]
    program = "from syncline.cli.main import main\nif __name__ == '__main__':\n    main()\n"
    result = as_ordinary_user(program, *arguments, home=home)
    assert result.returncode == 0, result.stderr
    content = json.loads((home / "run" / "results.json").read_text())
    assert content["network"]["emulated"]
    assert content["runs"][0]["status"] == "ok"
    assert content["runs"][0]["wire"]["measured"]
    assert (home / "run" / "report.html").stat().st_uid == (_NOBODY if os.geteuid() == 0 else os.geteuid())
