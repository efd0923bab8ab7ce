"""Partitions: PipeTransformer's traces of (frozen, stages, replicas), and the best balance against all partitions."""

from itertools import combinations, pairwise

import pytest

from syncline.errors import UsageError
from syncline.pipeline.freeze.policies import Progress, schedule
from syncline.pipeline.layout import lay_out
from syncline.pipeline.mesh import Shape
from syncline.pipeline.partition import balanced, costs_by_parameters, greedy, largest, stages_that_fit

# alpha: (frozen blocks, stages, replicas) after each epoch of ViT-B/16 on 16 GPUs, 8 stages at the start
TRACES = {
    1 / 3: "(0,8,2)(4,8,2)(7,4,4)(9,2,8)(10,2,8)(11,1,16)",
    1 / 5: "(0,8,2)(3,8,2)(5,4,4)(6,4,4)(8,4,4)(9,2,8)(9,2,8)(10,2,8)(10,2,8)(11,1,16)",
    1 / 2: "(0,8,2)(6,4,4)(9,2,8)(11,1,16)",
}
EMBEDDING, ATTENTION, MLP, NORM, HEAD = 742_656, 2_363_904, 4_723_968, 1_536, 769_000
VIT_B16 = [EMBEDDING, *([ATTENTION, MLP] * 12), NORM, HEAD]


@pytest.mark.parametrize("alpha", TRACES)
def test_the_traces_of_pipetransformer(alpha):
    stages, limit = 8, largest(VIT_B16, greedy(VIT_B16, 8))
    trace = ""
    for epoch in range(TRACES[alpha].count("(")):
        frozen = schedule(Progress(epoch, 12, 0), alpha=alpha)
        if frozen:
            stages = stages_that_fit(VIT_B16[1 + 2 * frozen :], stages=stages, limit=limit)
        trace += f"({frozen},{stages},{16 // stages})"
    assert trace == TRACES[alpha]


def all_partitions(count, stages):
    for inner in combinations(range(1, count), stages - 1):
        yield tuple(range(a, b) for a, b in pairwise((0, *inner, count)))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("frozen", [0, 3])
def test_balanced_is_the_best_of_all_partitions(stages, frozen):
    costs = costs_by_parameters([3, 5, 9, 2, 6, 5, 3, 5, 8], frozen=frozen)
    found = balanced(costs, stages)
    assert [at for stage in found for at in stage] == list(range(9))
    assert all(found)
    assert largest(costs, found) == min(largest(costs, p) for p in all_partitions(9, stages))


def test_a_cached_prefix_stays_in_one_stage_and_impossible_partitions_are_named():
    costs = costs_by_parameters([10, 10, 10, 10, 1, 1], frozen=4)
    assert balanced(costs, 3, together=4) == (range(4), range(4, 5), range(5, 6))
    cached = lay_out(Shape(3, 1), [60, 60, 60, 60, 10, 10, 10], schedule="gpipe", frozen=4, together=True)
    assert cached.stages == (range(5), range(5, 6), range(6, 7)), "what is read costs nothing"
    with pytest.raises(UsageError, match="use 1 to 3 stages"):
        balanced(costs, 4, together=4)
    with pytest.raises(UsageError, match="use 1 to 6 stages"):
        balanced(costs, 7)
