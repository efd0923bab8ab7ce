"""Wheel and sdist of a source tree, and a new virtual environment with pip and torch (linked, not installed again)."""

import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

_SCRIPT = """#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


def make(folder: Path, *more: str) -> Path:
    """Make the environment in a folder, with torch and `more` packages of this one; returns its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in ("torch", *more):
        for found in _with_requirements(name).values():
            _link(found, site, folder / "bin")
    return folder / "bin"


def build_both(tree: Path, folder: Path) -> tuple[Path, Path]:
    """Build the sdist of a source tree in a folder, and the wheel from that sdist."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(tree)], check=True, timeout=300)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def build(tree: Path, folder: Path) -> Path:
    """Build the wheel of a source tree in a folder."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(tree)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _with_requirements(name: str) -> dict[str, Distribution]:
    """An installed package and those that it requires."""
    found: dict[str, Distribution] = {}
    todo = [name]
    while todo:
        package = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if package in found:
            continue
        found[package] = distribution(package)
        for text in found[package].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


def _link(package: Distribution, site: Path, programs: Path) -> None:
    names = {path.parts[0] for path in package.files or () if path.parts[0] not in ("..", "__pycache__")}
    for name in names:
        if not (site / name).exists():
            (site / name).symlink_to(str(package.locate_file(name)))
    for point in package.entry_points.select(group="console_scripts"):
        script = programs / point.name
        module, function = point.value.split(":")
        script.write_text(_SCRIPT.format(python=programs / "python", module=module, function=function))
        script.chmod(0o755)
