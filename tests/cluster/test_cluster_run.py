"""Commands on nodes: environment, output, failure, interruption, and nothing left running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import marked_processes, until

from syncline.cluster import Cluster
from syncline.cluster.run import rendezvous, run_on_nodes
from syncline.errors import UsageError

pytestmark = pytest.mark.namespaces

# A command that leaves as much behind as it can: a daemon in a session of its own, deaf to SIGTERM.
_STUBBORN = "trap '' TERM; setsid sleep 100 & echo started; sleep 100; sleep 100"

_ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total[0].item(), "of", dist.get_world_size())
dist.destroy_process_group()
"""

_OWNER = f"""
import sys
from syncline.cluster import Cluster
from syncline.cluster.run import run_on_nodes
with Cluster(2) as cluster:
    sys.exit(run_on_nodes(cluster, ["sh", "-c", {_STUBBORN!r}]))
"""


def test_every_node_runs_the_command_and_output_lines_name_the_node(capfd: pytest.CaptureFixture[str]) -> None:
    with Cluster(3) as cluster:
        code = run_on_nodes(cluster, ["sh", "-c", "echo $RANK of $WORLD_SIZE; printf 'a\\rb' >&2"])
    output = capfd.readouterr()
    assert code == 0
    assert sorted(output.out.splitlines()) == [f"[node {n}] {n} of 3" for n in range(3)]
    assert sorted(output.err.splitlines()) == [f"[node {n}] {letter}" for n in range(3) for letter in "ab"]


def test_the_environment_is_complete_and_nothing_is_substituted(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import os, socket, sys\n"
        "e = os.environ\n"
        "print(e['NODE_RANK'], e['GROUP_RANK'], e['SYNCLINE_NODE'], e['LOCAL_RANK'], e['LOCAL_WORLD_SIZE'],\n"
        "      e['RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'], e['MASTER_PORT'],\n"
        "      {e['GLOO_SOCKET_IFNAME'], e['NCCL_SOCKET_IFNAME']} < {n for _, n in socket.if_nameindex()},\n"
        "      sys.argv[1])\n"
    )
    with Cluster(2) as cluster:
        assert run_on_nodes(cluster, [sys.executable, "-c", script, "$RANK"], nproc_per_node=2) == 0
        master = cluster.nodes[0].address
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        f"[node {n}, rank {2 * n + i}] {n} {n} {n} {i} 2 {2 * n + i} 4 {master} 29500 True $RANK"
        for n in range(2)
        for i in range(2)
    ]


def test_rendezvous_differs_only_in_the_place() -> None:
    with Cluster(2) as cluster:
        one, two = (rendezvous(cluster, rank=rank) for rank in range(2))
    assert {name for name in one if one[name] != two[name]} == {"RANK", "GROUP_RANK", "NODE_RANK", "SYNCLINE_NODE"}


def test_the_first_failure_is_named_and_ends_all_others(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.monotonic()
    others = f"until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/2 ]; do sleep 0.05; done; sleep 0.3; exit 7"
    script = f'if [ "$RANK" = 1 ]; then {others}; fi; touch {tmp_path}/$RANK; {_STUBBORN}'
    with Cluster(3) as cluster:
        assert run_on_nodes(cluster, ["sh", "-c", script]) == 7
    output = capfd.readouterr()
    assert output.err.splitlines() == ["[node 1] failed with exit code 7; ending the other 2"]
    assert output.out.count("started") == 2  # the stubborn ones were there
    assert time.monotonic() - start < 8
    assert marked_processes() == []


def test_a_command_killed_by_a_signal_fails_with_its_number(capfd: pytest.CaptureFixture[str]) -> None:
    with Cluster(2) as cluster:
        assert run_on_nodes(cluster, ["sh", "-c", "[ $RANK = 0 ] || kill -SEGV $$"]) == 128 + signal.SIGSEGV
    assert "[node 1] failed with exit code 139" in capfd.readouterr().err


def test_processes_left_behind_by_a_command_are_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with Cluster(1) as cluster:
        assert run_on_nodes(cluster, ["sh", "-c", "setsid sleep 100 & echo $!"]) == 0
    left = int(capfd.readouterr().out.split()[-1])
    assert not Path(f"/proc/{left}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_with_the_owner(
    number: signal.Signals, program: Callable[..., "subprocess.Popen[str]"]
) -> None:
    owner = program(_OWNER)
    assert owner.stdout is not None
    assert {owner.stdout.readline(), owner.stdout.readline()} == {"[node 0] started\n", "[node 1] started\n"}
    # The owner, and on each node the guard, the shell, its daemon and the program it waits for.
    assert until(lambda: len(marked_processes()) == 1 + 2 * 4)
    owner.send_signal(number)
    owner.communicate()
    assert owner.returncode in (-number, 130)
    assert until(lambda: marked_processes() == [], seconds=8)


@pytest.mark.parametrize(
    ("command", "nproc", "sentence"),
    [([], 1, "no command"), (["no-such-program"], 1, "no such program"), (["true"], 0, "choose 1 or more")],
)
def test_commands_that_cannot_be_run(command: list[str], nproc: int, sentence: str) -> None:
    with Cluster(1) as cluster, pytest.raises(UsageError, match=sentence):
        run_on_nodes(cluster, command, nproc_per_node=nproc)


@pytest.mark.full  # with `cli/test_compare.py`, which compares strategies under two agents on two nodes
def test_two_torchrun_agents_reduce_across_two_nodes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # agents leave their log folders there
    script = tmp_path / "reduce.py"
    script.write_text(_ALL_REDUCE)
    agent = (
        f"{sys.executable} -m torch.distributed.run --nnodes $NNODES --nproc-per-node 1 --node-rank $NODE_RANK "
        f"--master-addr $MASTER_ADDR --master-port $MASTER_PORT {script}"
    )
    with Cluster(2, bandwidth="1Gbit") as cluster:
        assert run_on_nodes(cluster, ["sh", "-c", agent]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["[node 0] sum 3.0 of 2", "[node 1] sum 3.0 of 2"]


def test_ranks_meet_without_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(_ALL_REDUCE)
    with Cluster(2) as cluster:
        assert run_on_nodes(cluster, [sys.executable, str(script)]) == 0
    assert capfd.readouterr().out.count("sum 3.0 of 2") == 2
    assert os.environ.get("RANK") is None
