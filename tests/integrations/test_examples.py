"""Every script of examples/ for an integration runs on real ranks, and learns; test_ray.py has Ray's."""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {"attach_loop.py": 2, "ddp_hook_loop.py": 2, "fsdp2_loop.py": 4, "accelerate_loop.py": 2,
         "trainer_finetune.py": 2, "lightning_fit.py": 2}  # fmt: skip
SLOW = ("trainer_finetune.py", "lightning_fit.py")
"""Their frameworks take long to import, and test_trainer.py and test_lightning.py run them, too."""
ELSEWHERE = {"ray_train.py": "test_ray.py", "ddp_loop.py": "docs/why-slow.md"}


def run(rank: int, world: int, name: str, folder: str) -> list[str]:
    """Run a script as torchrun would, for one step and for 25; the process group exists already."""
    os.chdir(folder)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", GROUP_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29555", TORCHELASTIC_RUN_ID="test", SYNCLINE_PLAN_CACHE="off")
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    texts = []
    for steps in ("1", "25"):
        sys.argv = [name, "--compress", "powersgd(rank=4)", "--steps", steps]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        texts.append(printed.getvalue())
    return texts


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW)) for n in RANKS])
def test_the_example_runs_and_learns(name: str, tmp_path: Path) -> None:
    first, *others = run_ranks(run, RANKS[name], name, str(tmp_path), timeout=100)
    start, end = (float(re.search(r"loss (\d+\.\d+)", text)[1]) for text in first)  # type: ignore[index]
    assert end < start - 0.01
    assert not any("loss" in text for texts in others for text in texts), "rank 0 alone prints the loss"


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RANKS) | set(ELSEWHERE)
