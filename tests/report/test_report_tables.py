"""Console tables: they fit, they hold the figures, and hostile strings stay inert."""

import io
import re

import pytest
from rich.console import Console

import report_samples as samples
from syncline.report import tables
from syncline.report.tables import print_summary
from syncline.results.schema import Results

NAMES = list(samples.STRATEGIES)


def printed(results: Results, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_summary(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 100, 120, 140, 200])
def test_everything_fits_and_no_figure_is_cut(width: int) -> None:
    text = printed(samples.results(*[samples.run(n) for n in NAMES[:-1]], samples.crashed(steps=17)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for figure in ("2502", "2900-3017", "229", "66%", "12.7%", "crashed", "gather-scatter", "0.57"):
        assert figure in text or (figure == "0.57" and width >= tables.WIDE)


def test_scaling_table_shows_both_speedups() -> None:
    text = printed(samples.scaling(), 80)
    assert "22.4 s" in text
    assert "3.3x" in text
    assert "0.71x" in text


def test_hostile_strings_reach_the_terminal_inert() -> None:
    run = samples.run("ddp")
    run["strategy"] = "[bold red]x[/]\x1b[2J\x07\u202e"
    crash = samples.crashed("[link=file:///]y")
    crash["error"]["summary"] = "\x1b]0;owned\x07 [/nope]"
    text = printed(samples.results(run, crash, warnings=["[/]\x1b[31m"]), 120)
    assert "[bold red]x[/]" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[link=file:///]y: crashed on rank 2" in " ".join(text.split())


def test_a_single_run_and_no_run_print() -> None:
    assert "takes 990 ms per step" in printed(samples.results(samples.run("ddp")), 80)
    assert "Nothing was run" in printed({**samples.results(), "runs": []}, 80)


@pytest.mark.parametrize("width", [40, 80])
def test_long_names_are_broken_between_words(width: int) -> None:
    name = "syncline(my_codec:blocksign(block=64) | bf16, plan=first)"
    table = tables.simple_table("", ["strategy", "step", "wire"], [[name, "12.3 ms", "1.20 MB"]])
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    words = re.findall(r"\w+", "\n".join(lines[2:]))
    assert [word for word in re.findall(r"\w+", name) if word not in words] == []
