"""Every block of README and docs is covered: its label, options of commands, programs, and commands that are quick."""

import re
import shlex
import subprocess
import tomllib

import pytest
import typer
from documented import LANGUAGES, ROOT, blocks, changed, looks_like_a_command, pages
from forked import call
from quick import EXPECTED, NEEDS, NOT_RUN, PRELUDES, PYTHON, SHORTER, expected, program, shortened, why_not_run

from ranks import run_ranks
from syncline import plan
from syncline.cli.main import app
from syncline.train.config import load_recipe

QUICK = ("docs/analysis.md", "docs/diff.md", "docs/report.md")
"""Pages whose commands read a recorded run: these run in every test."""
FIRST_STEPS = "docs/first-steps.md"  # has a test of its own
ELSEWHERE = {
    "docs/plan.md": "plan/test_plan_docs.py",
    "docs/planner.md": "plan/test_plan_planner.py",
    "docs/sim.md": "sim/test_sim_docs.py",
    "docs/write-a-compressor.md": "codecs/test_codec_docs.py",
    "docs/cluster.md": "docs/test_commands.py",
}
"""Tests that run all programs of a page, and check more than that they run."""
ALL = [block for page in pages() for block in blocks(page)]


def test_every_block_says_what_it_is():
    for block in ALL:
        assert block.language in LANGUAGES, f"{block.place}: begin the block with ``` and one of {LANGUAGES}"
        if block.language == "text":
            assert not looks_like_a_command(block.text), f"{block.place}: a command is in a block ```sh"


def test_every_entry_of_the_tables_is_used():
    commands = [command for block in ALL for command in block.commands]
    programs = "\n".join(block.text for block in ALL if block.language in ("python", "diff"))
    for pattern in [*NOT_RUN, *EXPECTED, *NEEDS, *(pattern for pattern, _ in SHORTER)]:
        assert any(re.search(pattern, command) for command in commands), pattern
    for pattern, _ in PYTHON:
        assert re.search(pattern, programs), pattern
    assert set(PRELUDES) <= {block.page for block in ALL if block.language in ("python", "diff")}


def _parse(words: list[str]) -> None:
    """Check the arguments of `syncline` as the command line does, without running anything."""
    command = typer.main.get_command(app)
    context = command.make_context("syncline", list(words))
    while hasattr(command, "resolve_command"):
        words = [*getattr(context, "_protected_args", ()), *context.args]  # versions of click differ
        name, command, rest = command.resolve_command(context, words)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", [p for p in pages() if any(b.commands or b.is_script for b in blocks(p))])
def test_options_of_commands_exist(page):
    for block in blocks(page):
        texts = block.commands
        if block.is_script:  # there the command is the end of a quoted text
            texts = [line.rstrip("&'\" ") for line in re.sub(r"\\\n\s*", "", block.text).splitlines()]
        for text in texts:
            if found := re.search(r"(?<!#SBATCH --job-name=)(?:^|-m )syncline (.*)", text):
                words = shlex.split(found[1])
                _parse(words[: words.index("|")] if "|" in words else words)


def _execute(rank, world, folder, texts):
    import os
    import sys

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    scope = {"__name__": "documented"}
    for place, text in texts:
        try:
            exec(compile(text, place, "exec"), scope)
        except Exception as error:
            raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error


def _programs(page):
    """The programs of a page with their places; a diff stands for the program after the change."""
    for block in blocks(page):
        if block.language == "python" and not block.file:
            yield block.place, program(block.text)
        elif block.language == "diff" and page != FIRST_STEPS:
            lines = [line[1:] for line in block.text.splitlines() if not line.startswith("-")]
            indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            yield block.place, program("\n".join(line[indent:] for line in lines))


def test_pages_that_are_tested_elsewhere():
    for page, test in ELSEWHERE.items():
        assert page.removeprefix("docs/") in (ROOT / "tests" / test).read_text(), f"{test} does not read {page}"


@pytest.mark.parametrize("page", [p for p in pages() if list(_programs(p)) and p not in ELSEWHERE])
def test_programs_run(page, prepared):
    texts = [(f"before {page}", PRELUDES.get(page, "")), *_programs(page)]
    run_ranks(_execute, 2, str(prepared(page)), texts)


def test_settings_load(tmp_path):
    for block in ALL:
        if block.language == "toml":
            file = tmp_path / "settings.toml"
            file.write_text(block.text)
            (plan.load if "unit" in tomllib.loads(block.text) else load_recipe)(str(file))


@pytest.mark.parametrize("page", QUICK)
def test_quick_commands_run(page, prepared):
    folder = prepared(page)
    for block in blocks(page):
        for command in block.commands:
            if not why_not_run(command):
                verb, *words = shlex.split(shortened(command))
                assert verb == "syncline"
                done = call(*words, cwd=folder)
                code, pattern = expected(command)
                assert done.code == code, f"{block.place}: {command}: {done.err}"
                assert re.search(pattern, done.out + done.err), f"{block.place}: {command}: {done.out}"


def test_scripts_are_valid_shell():
    for block in ALL:
        if block.is_script:
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), block.place


def test_a_change_of_the_first_steps_fits_its_program():
    found = blocks(FIRST_STEPS)
    (script,) = [block.text for block in found if block.file]
    for block in found:
        if block.language == "diff":
            compile(changed(script, block.text), block.place, "exec")
    assert (ROOT / FIRST_STEPS).read_text().count("```diff") == 1
