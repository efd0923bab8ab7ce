"""`syncline cluster`: the arguments, the exit codes, the measurements."""

import json
import signal
import subprocess
from collections.abc import Callable

import pytest
from leftovers import marked_processes, until

pytestmark = pytest.mark.namespaces

_APP = "from syncline.cli.main import main\nmain()"

Program = Callable[..., "subprocess.Popen[str]"]


def test_the_command_gets_its_own_options_and_sets_the_exit_code(program: Program) -> None:
    script = 'echo "$0 $1 $NODE_RANK"; sleep $NODE_RANK; exit $NODE_RANK'
    tool = program(_APP, "cluster", "--nodes", "2", "--bandwidth", "1Gbit", "--", "sh", "-c", script, "--nodes", "9")
    output, errors = tool.communicate()
    assert sorted(output.splitlines()) == ["[node 0] --nodes 9 0", "[node 1] --nodes 9 1"]
    assert errors.startswith("[node 1] failed with exit code 1")
    assert tool.returncode == 1


def test_links_are_measured(program: Program) -> None:
    tool = program(_APP, "cluster", "--nodes", "2", "--bandwidth", "200Mbit", "--measure", "--json")
    result = json.loads(tool.communicate()[0])
    assert result["asked"] == 200_000_000
    assert [(link["source"], link["target"]) for link in result["links"]] == [(0, 1), (1, 0)]
    # Whether a link is exact is test_cluster_measure's question; busy cores may take from it here.
    assert all(100e6 < link["bits_per_second"] < 220e6 for link in result["links"])


def test_links_are_measured_before_the_command_runs(program: Program) -> None:
    tool = program(_APP, "cluster", "--nodes", "2", "--bandwidth", "100Mbit", "--measure", "--", "echo", "hello")
    lines = tool.communicate()[0].splitlines()
    assert [line.rpartition(" ")[0] for line in lines[:2]] == ["node 0 -> node 1:", "node 1 -> node 0:"]
    assert sorted(lines[2:]) == ["[node 0] hello", "[node 1] hello"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "write a command after '--'"),
        (["--measure", "--nodes", "1"], "choose --nodes 2 or more"),
        (["--bandwidth", "fast", "--", "true"], "not a bandwidth"),
        (["--nodes", "0", "--", "true"], "choose 1 to 250"),
        (["--", "no-such-program"], "no such program"),
    ],
)
def test_bad_input_is_one_line(program: Program, arguments: list[str], sentence: str) -> None:
    tool = program(_APP, "cluster", *arguments)
    output, errors = tool.communicate()
    assert (tool.returncode, output, errors.count("\n")) == (2, "", 1)
    assert sentence in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tool_ends_all_processes_before_it_ends(program: Program, number: signal.Signals) -> None:
    tool = program(_APP, "cluster", "--nodes", "2", "--", "sh", "-c", "setsid sleep 100 & sleep 100")
    assert until(lambda: sum("sleep 100" in line for line in marked_processes()) >= 4)
    tool.send_signal(number)
    tool.communicate()
    assert tool.returncode == 128 + number
    assert marked_processes() == []
