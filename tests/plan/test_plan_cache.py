"""The plan cache's files: what finds a plan again, what does not, and files that nobody should trust."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from syncline.plan import Costs, LinkCost, Shape, bucket_plan, cache, default_plan
from syncline.plan.cache import Job, Remembered, cache_folder, nearest

SHAPES = [Shape("a.weight", (64, 64)), Shape("a.bias", (64,))]
JOB = Job(("a.weight: [64, 64] torch.float32",), 2, (0, 0), "cpu", "compress auto", "syncline 1, torch 2")
CODECS = ["none", "bf16", "int8"]
COSTS = Costs(2, 0.1, 0.2, {"a.weight": 0.0}, {"a.weight": 0.2}, LinkCost(1e-4, 1e8))


def remembered(**changed: Any) -> Remembered:
    plan = default_plan(SHAPES, compress="int8")
    return replace(Remembered(plan, 0.4, 0.9, 0.5, 0.0, "because", COSTS), **changed)


def found(folder: Path, job: Job = JOB) -> list[Remembered]:
    texts, problems = cache.read(folder, job, CODECS)
    assert not problems
    return [cache.parse_remembered(text, job, CODECS) for text in texts]


def test_a_plan_comes_back_for_the_same_job_and_network(tmp_path: Path) -> None:
    cache.write(tmp_path, JOB, remembered())
    (back,) = found(tmp_path)
    assert back == remembered()
    assert back.plan.hash == remembered().plan.hash
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "whole files only"
    for other in (
        replace(JOB, world=4),
        replace(JOB, parameters=("a.weight: [64, 65] torch.float32",)),
        replace(JOB, request="compress int8"),
        replace(JOB, versions="syncline 1, torch 3"),
        replace(JOB, device="cuda H200"),
        replace(JOB, nodes=(0, 1)),
    ):
        assert not found(tmp_path, other)


def test_a_file_for_each_speed_of_the_network(tmp_path: Path) -> None:
    for network in (0.5, 0.52, 5.0):
        cache.write(tmp_path, JOB, remembered(network=network))
    plans = found(tmp_path)
    assert sorted(one.network for one in plans) == [0.52, 5.0], "about the same speed replaces"
    for now, expected in ((0.6, 0.52), (0.45, 0.52), (4.0, 5.0), (1.5, None), (0.1, None)):
        best = nearest(plans, now)
        assert (best and best.network) == expected, now


def test_dense_buckets_are_right_for_any_faster_network_and_small_times_do_not_matter() -> None:
    dense = remembered(plan=bucket_plan(SHAPES))
    assert dense.suits(0.01)
    assert not dense.suits(0.8)
    assert remembered(network=0.01, step=1.0).suits(0.09)
    assert not remembered(plan=bucket_plan(SHAPES, codec="bf16")).suits(0.1)
    fast = remembered(plan=bucket_plan(SHAPES, codec="bf16"), network=0.05, step=0.2)
    assert fast.suits(0.14), "the backward pass hides the exchange, and the probe is inexact"
    assert not fast.suits(0.16)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda table: "{", "Expecting"),
        (lambda table: json.dumps([1]), "does not hold a remembered plan"),
        (lambda table: json.dumps({**table, "version": 99}), "version 99"),
        (lambda table: json.dumps({**table, "job": {}}), "another job"),
        (lambda table: json.dumps({**table, "step": -1}), "not a number of seconds"),
        (lambda table: json.dumps({**table, "plan": "order = 3"}), "version"),
        (lambda table: json.dumps({**table, "plan": table["plan"].replace("int8", "evil.code:run")}), "not asked for"),
        (lambda table: json.dumps({**table, "plan": table["plan"].replace("allgather", "evil.code:run")}), "evil"),
        (lambda table: json.dumps({**table, "costs": {"version": 1}}), "does not hold"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_sentence(tmp_path: Path, edit: Any, says: str) -> None:
    path = cache.write(tmp_path, JOB, remembered())
    path.write_text(edit(json.loads(path.read_text())))
    texts, problems = cache.read(tmp_path, JOB, CODECS)
    assert texts == []
    (problem,) = problems
    assert str(path) in problem
    assert "is ignored" in problem
    assert says in problem
    assert "\n" not in problem


def test_a_codec_may_be_written_in_any_way(tmp_path: Path) -> None:
    plan = default_plan(SHAPES, compress="powersgd(2)")
    cache.write(tmp_path, JOB, remembered(plan=plan))
    assert cache.read(tmp_path, JOB, ["powersgd(2)"])[1] == []
    assert cache.read(tmp_path, JOB, ["powersgd(rank=4)"])[0] == []


def test_old_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    for world in range(2, 8):
        cache.write(tmp_path, replace(JOB, world=world), remembered())
    assert len(list(tmp_path.iterdir())) == 3
    assert found(tmp_path, replace(JOB, world=7))


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() is None, "off under pytest"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(True) == tmp_path / "syncline" / "plans"
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert cache_folder(tmp_path) == tmp_path
    for word in ("off", "0", "OFF"):
        monkeypatch.setenv(cache.VARIABLE, word)
        assert cache_folder() is None
    assert cache_folder(False) is None
    assert cache_folder(True) == tmp_path / "syncline" / "plans"
