"""The Dockerfile, checked without Docker: its files exist, its commands are valid, and they are enough to install."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer.main

from syncline.cli.main import app
from syncline.train.config import load_recipe

ROOT = Path(__file__).parents[1]
KNOWN = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}


def _instructions():
    """Pairs of instruction and arguments; comments are left out, and continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


FOUND = _instructions()


def _all(name):
    return [arguments for instruction, arguments in FOUND if instruction == name]


def _copied():
    """Source paths of all COPY instructions, with their targets."""
    return [(source, target) for line in _all("COPY") for *sources, target in [line.split()] for source in sources]


def _copy(folder):
    for source, target in _copied():
        path = ROOT / source
        goal = folder / target / path.name if target.endswith("/") else folder / target
        goal.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, goal, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, goal)
    return folder


def test_the_base_image_is_an_argument():
    assert {name for name, _ in FOUND} == KNOWN
    assert FOUND[0] == ("ARG", "BASE=python:3.11-slim")
    assert FOUND[1] == ("FROM", "${BASE}")


def test_all_copied_files_exist_and_reach_the_build():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {source for source, _ in _copied()}
    for source, _ in _copied():
        assert (ROOT / source).exists(), source


@pytest.mark.parametrize("command", _all("RUN"))
def test_commands_are_valid(command, tmp_path):
    done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for extra in re.findall(r'"\.\[(\w+)\]"', command):
        assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in re.findall(r"--constraint (\w\S+)", command):
        assert file in {source for source, _ in _copied()}


def test_the_pin_of_torch_is_left_out_for_images_that_have_one(tmp_path):
    (command,) = [text for text in _all("RUN") if text.startswith("grep")]
    target = tmp_path / "constraints.txt"
    subprocess.run(["sh", "-c", command.replace("/tmp/constraints.txt", str(target))], cwd=ROOT, check=True)
    assert "torch==" in (ROOT / "constraints.txt").read_text()
    assert "torch==" not in target.read_text()
    assert len(target.read_text().splitlines()) == len((ROOT / "constraints.txt").read_text().splitlines()) - 1


def test_the_default_command_is_the_demo():
    ((program,), arguments) = (json.loads(_all(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert (program, arguments) == ("syncline", ["compare", "--recipe", "demo"])
    command = typer.main.get_command(app).get_command(None, arguments[0])
    assert arguments[1] in {option for parameter in command.params for option in parameter.opts}
    assert load_recipe(arguments[2]).cluster.nodes


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_copied_files_are_enough_for_the_package(tmp_path):
    tree = _copy(tmp_path / "source")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)],
        check=True,
        timeout=280,
    )
    (wheel,) = tmp_path.glob("*.whl")
    here = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "syncline").rglob("*") if p.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in here if "__pycache__" not in name} <= set(archive.namelist())
