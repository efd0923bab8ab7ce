"""The README's install commands in a clean environment, the wheel and what it says about itself, `make demo`."""

import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_string

import clean_environment
import pytest
from documented import ROOT, blocks
from packaging.requirements import Requirement

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


def _metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        return message_from_string(archive.read(name).decode())


def _links(description):
    return re.findall(r"\]\(([^)]*)\)", description)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_wheel_has_all_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    here = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*") if p.suffix not in ("", ".pyc")}
    assert {name for name in here if "__pycache__" not in name} <= names
    assert _metadata(wheel)["Requires-Dist"] == "torch>=2.11", "the first requirement, the only one without an extra"


EXTRAS = {"cli", "accelerate", "lightning", "tensorboard", "docs", "dev"}


@pytest.mark.full  # most of a minute; what the wheel says of itself and what the demo installs are tested above
@pytest.mark.namespaces
@pytest.mark.timeout(600)
def test_the_package_without_its_source_tree(tmp_path):
    """The wheel, built from the sdist, in a new environment: the extra's packages are found, and the demo runs."""
    sdist, wheel = clean_environment.build_both(ROOT, tmp_path / "dist")
    assert set(_metadata(wheel).get_all("Provides-Extra")) >= EXTRAS
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "scripts/package_description.py", "src/syncline/py.typed"} <= names
    needed = PROJECT["optional-dependencies"]["cli"]
    programs = clean_environment.make(tmp_path / "environment", *(Requirement(text).name for text in needed))
    (tmp_path / "here").mkdir()
    short = "--nodes 2 --batch 8 --steps 2 --strategies ddp,syncline --model mlp --set train.test_samples=8 --quiet"
    for command, said in {
        f"pip install --quiet --no-index '{wheel}[cli]'": "",  # all that the extra needs is there
        "pip check": "No broken requirements",
        "syncline doctor": "cores",
        f"syncline compare --recipe demo {short}": "report:",
    }.items():
        done = run(command, programs=programs, cwd=tmp_path / "here")
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        assert said in done.stdout
    where = run("python -c 'import syncline; print(syncline.__file__)'", programs=programs, cwd=tmp_path / "here")
    assert str(tmp_path / "environment") in where.stdout


def _package(folder, source=""):
    """A source tree with our metadata and no code; `source` is the address of the repository."""
    (folder / "src" / "syncline").mkdir(parents=True)
    (folder / "src" / "syncline" / "__init__.py").touch()
    (folder / "scripts").mkdir()
    for name in ("README.md", "LICENSE", "scripts/package_description.py"):
        shutil.copy(ROOT / name, folder / name)
    urls = f'[project.urls]\nSource = "{source}"\n\n' if source else ""
    settings = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(settings.replace("[project.scripts]", f"{urls}[project.scripts]", 1))
    return folder


ADDRESS = "https://example.org/us/syncline"


@pytest.mark.full
@pytest.mark.parametrize("source", ["", ADDRESS])
def test_the_description_in_a_wheel_has_no_relative_link(tmp_path, source):
    paths = _links((ROOT / "README.md").read_text())
    assert len(paths) > 10
    facts = _metadata(clean_environment.build(_package(tmp_path / "tree", source), tmp_path))
    assert facts["Project-URL"] == (f"Source, {source}" if source else None)
    description = facts.get_payload()
    for block in blocks("README.md"):
        assert block.text in description
    found = _links(description)
    if source:
        assert [link.removeprefix(f"{source}/").partition("/HEAD/")[2] for link in found] == paths
    else:
        assert not found
        assert "![" not in description
        assert all(f"`{path}`" in description for path in paths), "their files are named"


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
