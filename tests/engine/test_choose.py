"""Rank 0 searches for a plan; all ranks get its plan, or its error."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from ranks import run_ranks
from syncline.engine.process_groups import Groups
from syncline.engine.tuning.choose import from_rank_0
from syncline.errors import UsageError
from syncline.plan import Choice, Plan, Unit
from syncline.train.strategies import load

PLAN = Plan((Unit("a", ("a.weight",), "int8", "allgather"),), (("a", 0),), {"chosen": "int8"})
OTHER = Plan((Unit("a", ("a.weight",), "int4", "allgather"),), (("a", 0),), {"chosen": "int4", "error": 0.004})


def answers(rank: int, world: int) -> dict[str, Any]:
    groups = Groups(dist.group.WORLD, 60.0)
    groups.open(0)
    asked = []

    def find() -> Choice:
        asked.append(rank)
        return Choice(PLAN, 0.25, 0.125, (), "why: \u00e9")

    def fail() -> Choice:
        raise ValueError("no way")

    def with_contender() -> Choice:
        return replace(find(), contender=Choice(OTHER, 0.26, 0.0625, (), "much fewer bytes"))

    got = from_rank_0(groups, find)
    other = from_rank_0(groups, with_contender).contender
    assert other is not None
    with pytest.raises((ValueError, UsageError), match="no way"):
        from_rank_0(groups, fail)
    groups.close()
    return {
        "hash": got.plan.hash,
        "facts": (got.step, got.bound, got.why, got.contender),
        "asked": asked,
        "contender": (other.plan.hash, other.step, other.bound, other.why, other.contender),
        "about": dict(other.plan.about),
    }


def test_all_ranks_get_the_plan_of_rank_0() -> None:
    found = run_ranks(answers, 3)
    assert {one["hash"] for one in found} == {PLAN.hash}
    assert {one["facts"] for one in found} == {(0.25, 0.125, "why: \u00e9", None)}
    assert [one["asked"] for one in found] == [[0, 0], [], []]
    assert {one["contender"] for one in found} == {(OTHER.hash, 0.26, 0.0625, "much fewer bytes", None)}
    assert all(one["about"] == OTHER.about for one in found)


def test_a_strategy_does_not_override_an_exchange_silently() -> None:
    with pytest.raises(UsageError, match="leave carrier out"):
        load("syncline(auto, carrier=sharded)")
