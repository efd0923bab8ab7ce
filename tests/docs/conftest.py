"""A fresh folder with what documented commands and programs expect: a recorded run, traces, a script, some text."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cli"))  # the helpers of command-line tests

import clean_environment
from documented import ROOT, blocks
from forked import call

TRAIN = """
import os, torch, torch.distributed as dist
model = torch.nn.Linear(8, 8)
total = torch.ones(1000)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    dist.all_reduce(total)
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("sum", total[0].item())
if dist.is_initialized():
    dist.destroy_process_group()
"""
RUN = ("train", "--model", "mlp(hidden=16)", "--nproc", "2", "--batch", "8", "--steps", "24", "--out", "run")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A small run of DDP on two ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    done = call(*RUN, "--set", "train.test_samples=16", cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The built wheel of this tree."""
    return clean_environment.build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def prepared(tmp_path, recorded):
    """Prepare a folder for a page: `prepared(page)`."""

    def prepare(page: str) -> Path:
        folder = tmp_path / "here"
        folder.mkdir()
        for name in ("run", "before", "after"):
            shutil.copytree(recorded, folder / name)
        trace = recorded / "runs" / "ddp" / "trace.json.gz"
        for name in ("main", "pr", "syncline-trace"):
            (folder / name).mkdir()
            shutil.copy(trace, folder / name / "trace.json.gz")
        (folder / "profiles").mkdir()
        for rank in range(2):
            source = ROOT / "tests" / "trace" / "fixtures" / f"gloo-rank{rank}.json.gz"
            shutil.copy(source, folder / "profiles" / f"rank{rank}.json.gz")
        (folder / "my_package").mkdir()
        for name in ("train.py", "my_package/train.py"):
            (folder / name).write_text(TRAIN)
        (folder / "notes").mkdir()
        (folder / "notes" / "words.txt").write_text(" ".join(f"word{i % 97} of{i % 13}" for i in range(60_000)))
        for name in ("examples", "scripts", "Makefile", "pyproject.toml", "constraints.txt"):
            (folder / name).symlink_to(ROOT / name)
        for block in [*blocks(page), *blocks("docs/write-a-compressor.md")]:
            if block.file:
                (folder / block.file).write_text(block.text)
        return folder

    return prepare
