"""The README's diff, applied: the loop with the added line trains replicas that stay equal, without it they part."""

import re
import textwrap
from pathlib import Path

import pytest

from ranks import run_ranks

README = Path(__file__).parents[1] / "README.md"

PRELUDE = """
import torch, syncline
from torch import nn
torch.manual_seed(rank)
target = torch.Generator().manual_seed(0)
truth = torch.randn(20, 1, generator=target)
inputs = torch.randn(30, 16, 20)
loader = [(x, x @ truth) for x in inputs]
loss_fn, losses = nn.functional.mse_loss, []
"""


def _sides() -> tuple[str, str]:
    blocks = re.findall(r"```diff\n(.*?)```", README.read_text(), re.S)
    (block,) = [b for b in blocks if "syncline.attach" in b]
    lines = block.splitlines()
    before = [line[2:] for line in lines if not line.startswith("+")]
    after = [line[2:] for line in lines if not line.startswith("-")]
    assert sum(line.startswith("+") for line in lines) == 1, "one line is added"
    assert not any(line.startswith("-") for line in lines), "none is taken away"
    return textwrap.dedent("\n".join(before)), textwrap.dedent("\n".join(after))


def train(rank: int, world: int, program: str) -> tuple[list[float], list[float]]:
    space: dict[str, object] = {"rank": rank}
    exec(PRELUDE + program.replace("loss.backward()", "losses.append(loss.item()); loss.backward()"), space)
    model, losses = space["model"], space["losses"]
    return [float(v) for p in model.parameters() for v in p.detach().flatten()], losses  # type: ignore[attr-defined]


@pytest.mark.timeout(60)
def test_the_one_line_is_enough() -> None:
    before, after = _sides()
    parted = run_ranks(train, 2, before)
    assert parted[0][0] != parted[1][0], "without the line every rank trains its own model"
    together = run_ranks(train, 2, after)
    assert together[0][0] == together[1][0]
    for _, losses in together:
        assert sum(losses[-5:]) < 0.2 * sum(losses[:5]), losses
