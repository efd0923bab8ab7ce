"""Environment of ranks on one GPU, and the MPS daemon, with a fake of NVIDIA's MPS program."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import marked_processes, until

from syncline.cluster.gpu import mps_daemon, rank_environment
from syncline.cluster.nodes import Node

_NODE = Node(index=1, address="10.77.0.2", interface="sync0", netns="/nowhere")

# Daemonises as the real one does: the daemon is in a session of its own and its starter has ended.
_STAND_IN = """#!/bin/sh
here=${CUDA_MPS_PIPE_DIRECTORY:-DEFAULT}
echo "$* $here" >> CALLS
if [ "$1" = -d ]; then
    if [ -e BROKEN ]; then exit 1; fi
    setsid sh -c "echo \\$\\$ > $here/pid; exec sleep 100" &
    exit 0
fi
read question
if [ ! -e "$here/pid" ]; then echo "Cannot find MPS control daemon process"; exit 1; fi
if [ "$question" = quit ]; then kill "$(cat "$here/pid")"; rm "$here/pid"; echo quit >> CALLS; fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the MPS program on PATH; the file that it writes its calls into."""
    log, default, folders = tmp_path / "calls", tmp_path / "default", tmp_path / "tmp"
    folders.mkdir()
    default.mkdir()
    log.touch()
    script = tmp_path / "bin" / "nvidia-cuda-mps-control"
    script.parent.mkdir()
    text = _STAND_IN.replace("CALLS", str(log)).replace("DEFAULT", str(default))
    script.write_text(text.replace("BROKEN", str(tmp_path / "broken")))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    monkeypatch.setenv("TMPDIR", str(folders))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return log


def test_ranks_that_share_a_gpu_are_separate_hosts() -> None:
    shared = rank_environment(3, _NODE, ranks_on_gpu=2)
    assert shared == {
        "NCCL_HOSTID": "host3",
        "NCCL_SOCKET_IFNAME": "sync0",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "sync0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert rank_environment(3, _NODE, ranks_on_gpu=4)["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    # With a GPU each, the ranks of a node are one host: they may use what is fast inside one.
    assert rank_environment(3, _NODE, ranks_on_gpu=1)["NCCL_HOSTID"] == "host1"


def test_the_daemon_runs_during_the_block_in_a_private_folder(calls: Path) -> None:
    with mps_daemon() as environment:
        assert set(environment) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert all(Path(folder).is_dir() for folder in environment.values())
        assert any("sleep 100" in process for process in marked_processes())
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert f"-d {pipe}" in calls.read_text().splitlines()
    assert calls.read_text().splitlines()[-1] == "quit"
    assert not Path(pipe).exists()
    assert marked_processes() == []


def test_a_running_daemon_is_used_and_not_ended(calls: Path) -> None:
    (calls.parent / "default" / "pid").write_text("1")
    with mps_daemon() as environment:
        assert environment == {}
    assert not any(line.startswith("-d") or line == "quit" for line in calls.read_text().splitlines())


def test_a_daemon_that_does_not_start_gives_a_warning(calls: Path) -> None:
    (calls.parent / "broken").touch()
    with pytest.warns(UserWarning, match="ranks will take turns on the GPU"), mps_daemon() as environment:
        assert environment == {}
    assert "-d" in calls.read_text()
    assert list((calls.parent / "tmp").iterdir()) == []


def test_without_mps_no_variables_are_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps_daemon() as environment:
        assert environment == {}


def test_the_daemon_ends_with_a_killed_owner_and_the_next_owner_removes_its_folder(
    calls: Path, program: Callable[..., "subprocess.Popen[str]"]
) -> None:
    owner = program(
        "import time\nfrom syncline.cluster.gpu import mps_daemon\n"
        "with mps_daemon() as environment:\n"
        "    print(environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n    time.sleep(100)"
    )
    assert owner.stdout is not None
    pipe = Path(owner.stdout.readline().strip())
    assert (pipe / "pid").exists()
    with mps_daemon() as second:
        assert pipe.exists()  # a living owner's folder is not swept
        assert second["CUDA_MPS_PIPE_DIRECTORY"] != str(pipe)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert until(lambda: marked_processes() == [], seconds=8)
    assert pipe.exists()
    with mps_daemon():
        assert not pipe.parent.exists()
    owner.communicate()
