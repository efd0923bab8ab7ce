"""Freezing parameters on some ranks only: every rank learns it at once, by name."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks

TIMEOUT = 30


def freeze(rank: int, world: int, frozen: dict[int, list[str]], unused: bool) -> tuple[str, float]:
    """The error of this rank when each rank freezes its own list, and the seconds until it was raised."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second", "other", "spare")})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = syncline.plan.default_plan(
        [syncline.plan.Shape(n, tuple(p.shape), p.dtype) for n, p in net.named_parameters()], group_bytes=0
    )
    sync = syncline.attach(net, optimizer, plan=rows, timeout=TIMEOUT)
    used = ["first", "second", "other"] + ["spare"] * (not unused)
    began, error = time.monotonic(), ""
    try:
        for step in range(4):
            if step == 2:
                began = time.monotonic()
                for name in frozen.get(rank, ()):
                    net[name].requires_grad_(False)
            x = torch.randn(4, 8)
            for name in used:
                x = net[name](x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.wait()
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    took = time.monotonic() - began
    sync.close(reuse_groups=False)
    return error, took


CASES: dict[str, Any] = {
    "one rank": ({1: ["first"]}, ["rank 1 froze 'first.weight', 'first.bias', and rank 0 did not"] * 2),
    "rank 0": ({0: ["first", "other"]}, ["rank 0 froze 'first.weight', 'first.bias', 'other.weight' and 1 more"] * 2),
    "different": (
        {0: ["first"], 1: ["second"]},
        ["'first.weight' is frozen on rank 0 alone, 'first.bias' is frozen on rank 0 alone, 'second.weight'"] * 2,
    ),
    "alike": ({0: ["first"], 1: ["first"]}, ["", ""]),
}  # fmt: skip


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_freeze_different_parameters_are_told_at_once(case: str, unused: bool) -> None:
    frozen, expected = CASES[case]
    for (error, took), text in zip(run_ranks(freeze, 2, frozen, unused), expected, strict=True):
        assert text in error if text else not error
        assert took < TIMEOUT / 3
