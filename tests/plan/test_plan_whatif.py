"""What if: the recorded network gives the recorded answer, and 10,000 ranks take no longer than two."""

import math
import sys
import time
from dataclasses import replace

import pytest
from cost_cases import by_multiplications, costs
from model_shapes import mlp, vgg19

from syncline.errors import UsageError
from syncline.plan import default_plan, predict, search
from syncline.plan.other_network import (
    Cell,
    TargetNetwork,
    at,
    choose,
    infinite,
    outcome,
    recorded,
    stops_paying,
    sweep,
)
from syncline.plan.predict import launch

SHAPES = mlp()
COSTS = costs(SHAPES, 0.02, world=4, bytes_per_s=25e6)
LOSSY = ["int8", "int4"]


def test_the_recorded_network_gives_the_recorded_answer():
    here = recorded(COSTS)
    assert at(COSTS, here) == COSTS
    plan = default_plan(SHAPES, compress="int8")
    assert outcome(plan, SHAPES, COSTS, here).step == predict(plan, SHAPES, COSTS).step
    assert choose(SHAPES, COSTS, here, allowed=["int8"]) == search(SHAPES, COSTS, allowed=["int8"])


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "powersgd(rank=64)"])
@pytest.mark.parametrize("carrier", [None, "allgather", "gather-scatter"])
def test_scaled_bytes_are_those_that_counting_gives(codec, carrier, monkeypatch):
    plan = default_plan(SHAPES, compress=codec, exchange=carrier)
    there = TargetNetwork(16, 25e6)
    counted = outcome(plan, SHAPES, COSTS, there)
    monkeypatch.setattr(sys.modules["syncline.plan.predict"], "COUNTED", 8)
    launch.cache_clear()
    scaled = outcome(plan, SHAPES, COSTS, there)
    launch.cache_clear()
    assert scaled.wire == pytest.approx(counted.wire, rel=1e-3)
    assert scaled.step == pytest.approx(counted.step, rel=0.01)


def test_latency_grows_as_a_ring_is_long_or_a_tree_is_deep():
    ring, tree = (at(COSTS, TargetNetwork(64, 25e6, tree=tree)).link.latency for tree in (False, True))
    assert ring == pytest.approx(COSTS.link.latency * 63 / 3)
    assert tree == pytest.approx(COSTS.link.latency * 6 / 2)


def test_in_an_all_gather_every_rank_decodes_everybody():
    there = at(COSTS, TargetNetwork(16, 25e6)).codecs
    assert there["int8"].decode.each == pytest.approx(4 * COSTS.codecs["int8"].decode.each)
    assert there["bf16"] == COSTS.codecs["bf16"]


def test_an_infinite_network_leaves_compute_and_codecs():
    plan = default_plan(SHAPES)
    slow, free = (outcome(plan, SHAPES, COSTS, where) for where in (recorded(COSTS), infinite(recorded(COSTS))))
    assert free.wire == 0
    assert free.compute <= free.step < slow.step


def test_one_codec_can_be_asked_for_and_the_others_are_still_shown():
    for ranks in (4, 64):
        made = choose(SHAPES, COSTS, TargetNetwork(ranks, 1e9), only="int8")
        assert {unit.codec for unit in made.plan.units} == {"int8"}
        assert {w.name for w in made.alternatives} == {"none", "bf16", "int8"}
        assert made.plan.about["chosen"] == "int8"
        assert made.bound <= made.step
    assert choose(SHAPES, COSTS, TargetNetwork(64, 1e6), only="none").plan.about["chosen"] == "none"


def test_fast_links_need_no_compression_and_slow_ones_do():
    for ranks in (4, 256):
        tree = TargetNetwork(ranks, 1e12, tree=True)
        assert choose(SHAPES, COSTS, tree, allowed=LOSSY).plan.about["chosen"] == "none"
        assert choose(SHAPES, COSTS, replace(tree, bytes_per_s=5e6), allowed=LOSSY).plan.about["chosen"] != "none"


def test_ten_thousand_ranks_in_seconds():
    shapes = vgg19()
    measured = costs(shapes, 0.1, weights=by_multiplications(shapes))
    begin = time.perf_counter()
    made = choose(shapes, measured, TargetNetwork(10_000, 3e9, tree=True), allowed=LOSSY)
    assert time.perf_counter() - begin < 30
    assert made.bound <= made.step < math.inf
    made.plan.check(shapes, world=10_000)


def test_a_sweep_says_where_compression_stops_to_pay():
    rates = [1e6 * 4**n for n in range(10)]
    cells = sweep(SHAPES, COSTS, [TargetNetwork(n, r, tree=True) for n in (4, 64) for r in rates], compressed=LOSSY)
    assert [(c.ranks, c.bytes_per_s) for c in cells] == [(n, r) for n in (4, 64) for r in rates]
    assert cells[0].pays
    assert not cells[len(rates) - 1].pays
    for ranks, end in stops_paying(cells).items():
        assert end is not None
        row = [c for c in cells if c.ranks == ranks]
        assert all(c.pays for c in row[:1])
        assert not any(c.pays for c in row if c.bytes_per_s > end)
        assert any(c.pays for c in row if c.bytes_per_s <= end)


def test_the_end_lies_between_the_cells_around_it():
    def cell(rate, compressed):
        return Cell(2, rate, dense=2.0, bf16=1.0, compressed=compressed, codec="int8")

    end = stops_paying([cell(1e6, 0.5), cell(1e8, 1.1)])[2]
    assert end is not None
    assert 1e6 < end < 1e8
    assert stops_paying([cell(1e6, 0.5)]) == {2: None}
    assert stops_paying([cell(1e6, 1.0)]) == {2: 0.0}


def test_bad_settings_are_refused():
    for ranks, rate in ((1, 1e6), (2, 0.0), (2, -1.0)):
        with pytest.raises(UsageError, match="2 or more"):
            TargetNetwork(ranks, rate)
    with pytest.raises(UsageError, match=r"auto\(int8\)"):
        sweep(SHAPES, COSTS, [recorded(COSTS)], compressed=[])
