"""The README's install commands in a clean environment, the wheel and what it says about itself, `make demo`."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string

import clean_environment
import pytest
from documented import ROOT, blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(command, *, programs, cwd, timeout=300):
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "120"} | _index(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _index():
    """Where this machine's pip finds packages."""
    import os

    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}


def test_what_the_package_says_about_itself():
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(PROJECT["classifiers"])
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"!\[.*?\]\((.*?)\)", readme)
    assert links
    for link in links:
        assert (ROOT / link).is_file()
    for word in ("Linux", "Python 3.11", "torch 2.11", "Not macOS or Windows"):
        assert word in readme


def test_the_demo_installs_only_the_command_line(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    plans = {
        target: subprocess.run(
            ["make", "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for target in ("demo", "setup")
    }
    assert "'.[cli]'" in plans["demo"]
    assert "[dev]" not in plans["demo"]
    assert "'.[dev]'" in plans["setup"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_wheel_has_all_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        facts = message_from_string(archive.read(metadata).decode())
    here = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*") if p.suffix not in ("", ".pyc")}
    assert {name for name in here if "__pycache__" not in name} <= names
    assert facts["Requires-Dist"] == "torch>=2.11", "the first requirement, and the only one without an extra"
    assert "raw.githubusercontent.com" in facts.get_payload()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_readmes_commands_in_a_clean_environment(wheel, tmp_path):
    programs = clean_environment.make(tmp_path / "environment")

    def here(command):
        return run(command, programs=programs, cwd=tmp_path)

    # The library alone: torch is enough, and the command says what it needs.
    done = here(f"pip install --quiet --no-deps {wheel}")
    assert done.returncode == 0, done.stderr
    done = here("python -c 'import syncline; syncline.attach; print(syncline.__version__)'")
    assert done.stdout.strip() == PROJECT["version"], done.stderr
    done = here("syncline")
    assert done.returncode == 2
    assert done.stderr == "syncline: the command line needs typer: pip install 'syncline[cli]'\n"
    # The README's own lines, in the clone.
    (install,) = [block for block in blocks("README.md") if "pip install" in block.text]
    assert len(install.commands) == 2
    for command in install.commands:
        done = run(f"{command} --quiet", programs=programs, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    # The same from the wheel.
    done = here(f"pip install --quiet --force-reinstall --no-deps {wheel} && pip install --quiet '{wheel}[cli]'")
    assert done.returncode == 0, done.stderr
    for command, said in {
        "syncline --version": PROJECT["version"],
        "syncline doctor": "cores",
        "syncline list models": "vgg11",
        "syncline compare --strategies ddp,syncline --model 'mlp(hidden=16)' --nproc 2 --batch 8 --steps 3": "report:",
    }.items():
        done = here(command)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    assert list(tmp_path.glob("runs/*/report.html"))
