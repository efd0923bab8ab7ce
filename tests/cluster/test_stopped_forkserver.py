"""A forkserver that somebody stops (SIGSTOP) delays a command by seconds, and does not block it for ever."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from syncline.cluster import forkserver
from syncline.errors import UsageError

SCRIPT = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
from syncline.cluster import forkserver, ranks
from syncline.errors import RankFailure

ranks.PRELOAD = ()
forkserver.STOPPED_S = forkserver.GRACE_S = 0.5

def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

def stop(place, payload, report):
    os.kill(os.getppid(), signal.SIGSTOP)
    while state(os.getppid()) != "T":
        time.sleep(0.001)
    report(os.getpid())
    if payload == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return "value"

def plain(place, payload, report):
    return os.getppid()

def attempt(function, payload=None, pids=None):
    logs = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    keep = None if pids is None else lambda rank, pid: pids.append(pid)
    try:
        return ranks.run_ranks(function, [ranks.Place(rank=0, world_size=1)], payload, logs=logs, on_message=keep)[0]
    except RankFailure as failure:
        return str(failure)

def main():
    first = attempt(plain)
    os.kill(first, signal.SIGSTOP)  # before a start
    found, pids = {"start": attempt(plain), "first": first}, []
    for what in ("return", "die"):
        found[what] = attempt(stop, what, pids)  # while a rank runs
    found["last"] = attempt(plain)
    found["left"] = [pid for pid in (first, *pids) if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    script = folder / "stopped_script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_rank_that_cannot_be_started_is_a_named_error(found):
    first = found["first"]
    assert found["start"] == (
        f"rank 0 cannot be started: the forkserver, process {first}, is stopped; it was ended, run the command again"
    )


def test_a_result_is_not_lost_and_a_death_is_seen(found):
    assert found["return"] == "value"
    assert found["die"] == "rank 0 failed: left with exit code unknown before it had finished"


def test_the_next_ranks_get_a_new_forkserver_and_nothing_is_left(found):
    assert isinstance(found["last"], int)
    assert found["last"] != found["first"]
    assert found["left"] == []


def test_a_folder_with_too_long_a_path_for_sockets_is_named():
    def refuse():
        raise OSError("AF_UNIX path too long")

    with pytest.raises(UsageError, match="set TMPDIR=/tmp"):
        forkserver.start(SimpleNamespace(start=refuse))
