"""Freezing parameters on some ranks only: every rank learns it at once, by name, under both executors."""

import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline import UsageError
from syncline.plan import default_plan, shape_of

TIMEOUT = 30
AT_ONCE = TIMEOUT / 3
CHANGED = 2
"""The step before whose backward pass ranks change what they train."""


@dataclass(frozen=True)
class Case:
    """Which modules each rank freezes, and the error of all ranks."""

    frozen: dict[int, list[str]]
    expected: str = ""
    unfrozen: dict[int, list[str]] = field(default_factory=dict)
    """Modules that are frozen at attach, and unfrozen by these ranks."""
    unused: bool = False
    """Whether no rank uses one of the modules."""
    moment: str = "before forward"
    late: float = 0
    """Seconds by which rank 0 comes later to the pass."""


ALL = ["first", "second", "other", "spare"]
ONE = "rank 1 froze 'first.weight', 'first.bias', and rank 0 did not"
CASES = {
    "one rank": Case({1: ["first"]}, ONE),
    "one rank, unused parameters": Case({1: ["first"]}, ONE, unused=True),
    "one rank, after forward": Case({1: ["first"]}, ONE, moment="after forward"),
    "one rank, while it accumulates": Case({1: ["first"]}, ONE, moment="no_sync"),
    "rank 0": Case({0: ["first", "other"]}, "rank 0 froze 'first.weight', 'first.bias', 'other.weight' and 1 more"),
    "one rank unfreezes": Case({}, "rank 1 unfroze 'spare.weight', 'spare.bias', and rank 0 did not", {1: ["spare"]}),
    "the others come late": Case({1: ["first"]}, ONE, late=1.5),
    "the whole model": Case({1: ALL}, "rank 1 froze 'first.weight', 'first.bias', 'second.weight' and 5 more"),
    "rank 0's whole model": Case({0: ALL}, "rank 0 froze 'first.weight', 'first.bias', 'second.weight' and 5 more"),
    "different": Case(
        {0: ["first"], 1: ["second"]},
        "'first.weight' is frozen on rank 0 alone, 'first.bias' is frozen on rank 0 alone, 'second.weight'",
    ),
    "alike": Case({0: ["first"], 1: ["first"]}),
    "alike, unused parameters": Case({0: ["first"], 1: ["first"]}, unused=True),
    "alike, in turn": Case({0: ["first"], 1: ["first"]}, unfrozen={0: ["spare"], 1: ["spare"]}, moment="no_sync"),
    "alike, the whole model": Case({0: ALL, 1: ALL}),
    "alike, the whole model, late": Case({0: ALL, 1: ALL}, late=1.5),
    "alike, one rank late": Case({0: ["first"], 1: ["first"]}, late=1.5),
}  # fmt: skip


def run_case(case: Case, rank: int, executor: str) -> tuple[str, str, float, str]:
    """The executor in use when parameters were frozen, this rank's error, seconds until it, and its type."""
    import_module("syncline.engine.attach").START = executor
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(8, 8) for name in ALL})
    for name in {name for names in case.unfrozen.values() for name in names}:
        net[name].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = default_plan([shape_of(name, p) for name, p in net.named_parameters()], group_bytes=0)
    sync = syncline.attach(net, optimizer, plan=rows if executor == "overlap" else None, timeout=TIMEOUT)
    used = ["first", "second", "other"] + ["spare"] * (not case.unused)
    began, in_use = 0.0, ""

    def change() -> None:
        nonlocal began, in_use
        in_use, began = sync.plan.executor, time.monotonic() + case.late
        time.sleep(case.late * (rank == 0))
        for name in case.frozen.get(rank, ()):
            net[name].requires_grad_(False)
        for name in case.unfrozen.get(rank, ()):
            net[name].requires_grad_(True)

    try:
        for step in range(CHANGED + 2):
            for local in (True, False) if case.moment == "no_sync" else (False,):
                if step == CHANGED and not local and case.moment != "after forward":
                    change()
                x = torch.randn(4, 8)
                for name in used:
                    x = net[name](x)
                if step == CHANGED and case.moment == "after forward":
                    change()
                with sync.no_sync() if local else nullcontext():
                    if x.requires_grad:
                        x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.wait()
    except Exception as error:
        took = time.monotonic() - began
        sync.close(reuse_groups=False)
        return in_use, str(error), took, type(error).__name__
    sync.close()
    return in_use, "", time.monotonic() - began, ""


def freeze(rank: int, world: int, executor: str) -> dict[str, Any]:
    return {name: run_case(case, rank, executor) for name, case in CASES.items()}


@pytest.mark.parametrize("executor", [pytest.param("overlap", marks=pytest.mark.full), "reducer"])
def test_ranks_that_freeze_different_parameters_are_told_at_once(executor: str) -> None:
    ranks = run_ranks(freeze, 2, executor, timeout=120)
    for name, case in CASES.items():
        for used, error, took, kind in (found[name] for found in ranks):
            assert used == executor, name
            assert case.expected in error if case.expected else not error, (name, error)
            assert took < AT_ONCE, name
            assert kind == (UsageError.__name__ if case.expected else ""), (name, error)


def freeze_in_one_of_two_models(rank: int, world: int) -> tuple[list[str], float]:
    """The errors of three ranks, of which two freeze a part of the second model; the first one trains on."""
    import_module("syncline.engine.attach").START = "reducer"
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    pairs = zip(nets, optimizers, strict=True)
    syncs = [syncline.attach(net, optimizer, timeout=TIMEOUT) for net, optimizer in pairs]
    errors, began = [], 0.0
    for step in range(CHANGED + 1):
        for net, optimizer in zip(nets, optimizers, strict=True):
            if step == CHANGED and net is nets[1] and rank:
                assert syncs[1].plan.executor == "reducer"
                net[0].requires_grad_(False)
            began = time.monotonic()
            try:
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            except UsageError as error:
                errors.append(str(error))
    took = time.monotonic() - began
    for sync in syncs:
        sync.close(reuse_groups=False)
    return errors, took


def test_the_sentence_is_the_same_on_every_rank_and_other_models_train_on() -> None:
    found = run_ranks(freeze_in_one_of_two_models, 3)
    errors = {tuple(errors) for errors, _ in found}
    assert len(errors) == 1
    ((error,),) = errors
    assert re.search(r"rank [12] froze '0.weight', '0.bias', and rank 0 did not; freeze and unfreeze the same", error)
    assert all(took < AT_ONCE for _, took in found)
