"""A new virtual environment with pip and torch, and nothing else; torch is linked from here, not installed again."""

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


def make(folder: Path) -> Path:
    """Make the environment in a folder; returns its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    for found in _with_requirements("torch").values():
        _link(found, site, folder / "bin")
    return folder / "bin"


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
