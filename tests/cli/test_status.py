"""Progress of long commands: lines, a spinner on a terminal, nothing with `--quiet`; all long commands have both."""

import io

import pytest
from forked import call
from rich.console import Console

from syncline.cli.status import progress_lines


def shown(*, terminal, quiet=False):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=60, _environ={"TERM": "xterm"})
    with progress_lines(console, quiet=quiet) as progress:
        progress("round 1 of 2 [cpu]")
    return text.getvalue()


def test_lines_where_there_is_no_terminal():
    assert shown(terminal=False) == "round 1 of 2 [cpu]\n"


def test_a_spinner_with_the_time_on_a_terminal():
    text = shown(terminal=True)
    assert "round 1 of 2 [cpu]" in text
    assert "0:00:00" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_with_quiet(terminal):
    assert shown(terminal=terminal, quiet=True) == ""


LONG = [("train",), ("compare",), ("plan",)]
BENCHMARKS = ["codecs", "quality", "overhead", "recorder", "causes", "pipeline", "overlap", "models", "integrations"]
LONG += [("bench", name) for name in BENCHMARKS]


@pytest.mark.parametrize("command", LONG, ids=" ".join)
def test_long_commands_have_quiet(command):
    import typer.main

    from syncline.cli.main import app

    found = typer.main.get_command(app)
    for name in command:
        found = found.get_command(None, name)
    assert "--quiet" in {option for parameter in found.params for option in parameter.opts}


def test_a_quiet_run_prints_only_its_result(tmp_path):
    options = (
        "--model",
        "mlp(hidden=8)",
        "--nproc",
        "2",
        "--batch",
        "8",
        "--steps",
        "3",
        "--set",
        "train.test_samples=0",
    )
    done = call("train", *options, "--quiet", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "step 1" not in done.out
    assert "report:" in done.out
