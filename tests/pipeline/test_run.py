"""Pipelines of real ranks: gradients and losses of every schedule and shape against a single process."""

import copy

import pytest
import torch
import torch.distributed as dist
from pipelines import batch_of, freeze, reference, workload

from ranks import run_ranks
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.layout import frozen_sublayers
from syncline.pipeline.measure import measure_network
from syncline.pipeline.run import Pipeline
from syncline.pipeline.schedule import SCHEDULES, Stage

VIT, BERT, LM = "vit(size=tiny)", "bert(size=tiny, layers=4)", "transformer(size=tiny, task=lm)"


def gradients_match(pipe, expected, data, frozen, samples):
    """One step of the pipeline against the reference: (largest difference, names held, gradients sent by stage)."""
    sent = {}
    send = Stage.get_bwd_send_ops

    def counting(stage, chunk):
        ops = send(stage, chunk)
        sent[stage.stage_index] = sent.get(stage.stage_index, 0) + len(ops)
        return ops

    indices = torch.arange(samples)
    loss, expected = expected
    mine = indices[list(pipe.share(samples))]
    freeze(pipe.blocks, frozen)
    Stage.get_bwd_send_ops = counting
    try:
        got = pipe.train_batch(batch_of(data, mine), total=samples)
    finally:
        Stage.get_bwd_send_ops = send
    assert abs(float(got - loss)) < 1e-12
    held = {name: p for name, p in pipe.blocks.model.named_parameters() if p.numel()}
    worst = 0.0
    for name, p in held.items():
        assert (p.grad is not None) == (name in expected), name
        if p.grad is not None:
            worst = max(worst, float((p.grad - expected[name]).abs().max()))
    pipe.optimizer.zero_grad()
    frozen_stages = pipe.layout.frozen_stages(frozen_sublayers(pipe.blocks))
    assert not any(count for stage, count in sent.items() if stage <= frozen_stages), "a frozen stage gets no gradient"
    return worst, sorted(held), frozen_stages


def _all_cases(rank, world, cases):
    out, known = {}, {}
    for case in cases:
        spec, schedule, stages, frozen, samples = case
        if spec not in known:
            known[spec] = workload(spec)
        model, data = known[spec]
        about = (spec, frozen, samples)
        if about not in known:
            known[about] = reference(copy.deepcopy(model), batch_of(data, torch.arange(samples)), frozen)
        mine = copy.deepcopy(model)
        pipe = Pipeline(Blocks.of(mine), torch.optim.SGD(mine.parameters(), lr=0.1), stages=stages, schedule=schedule)
        try:
            out[case] = gradients_match(pipe, known[about], data, frozen, samples)
        finally:
            pipe.close()
    return out


def check(ranks, cases, **options):
    results = run_ranks(_all_cases, ranks, cases, **options)
    for case in cases:
        names = {name for name, _ in workload(case[0])[0].named_parameters()}
        held = set().union(*(result[case][1] for result in results))
        assert held == names, f"{case}: every parameter is held by some rank"
        assert max(result[case][0] for result in results) < 1e-12, case
    return [results[0][case][2] for case in cases]


def test_gradients_of_every_schedule_are_those_of_one_process():
    shapes = [(2, 0), (4, 3)] * 3
    cases = [(VIT, name, *shape, 8) for name, shape in zip(SCHEDULES, shapes, strict=True)]
    cases += [(VIT, "zero-bubble", 2, 3, 8), (VIT, "interleaved", 4, 0, 8)]
    others = [(BERT, "1f1b", 4, 1, 13), (VIT, "gpipe", 4, 3, 3), (VIT, "1f1b", 1, 3, 3)]
    frozen_stages = check(4, [*cases, *others])
    assert max(frozen_stages) >= 1, "whole stages are frozen in some cases"


def test_gradients_of_replicated_pipelines_are_those_of_one_process():
    check(8, [(VIT, "1f1b", 2, 0, 16), (VIT, "zero-bubble", 2, 2, 16), (VIT, "gpipe", 4, 3, 9)])


def _across_a_reshape(rank, world, changes):
    found = []
    for schedule, before, frozen, after in changes:
        model, data = workload(VIT)
        batch = batch_of(data, torch.arange(8))
        whole, rest = (reference(copy.deepcopy(model), batch, blocks) for blocks in (0, frozen))
        pipe = Pipeline(Blocks.of(model), torch.optim.SGD(model.parameters(), lr=0.1), stages=before, schedule=schedule)
        try:
            first = gradients_match(pipe, whole, data, 0, 8)[0]
            freeze(pipe.blocks, frozen)
            pipe.reshape(stages=after)
            found.append(max(first, gradients_match(pipe, rest, data, frozen, 8)[0]))
        finally:
            pipe.close()
    return found


def test_gradients_before_and_after_a_reshape_are_those_of_one_process():
    changes = [
        ("1f1b", 4, 2, 2),
        ("gpipe", 4, 3, 1),
        ("1f1b", 1, 1, 4),
        ("interleaved", 2, 2, 1),
        ("zero-bubble", 4, 2, 2),
    ]
    for found in run_ranks(_across_a_reshape, 4, changes):
        assert max(found) < 1e-12


def _automatic(rank, world, compress):
    torch.manual_seed(0)
    model, data = workload(VIT)
    pipe = Pipeline(
        Blocks.of(model), torch.optim.SGD(model.parameters(), lr=0.05), stages=2, compress=compress, plan_cache=False
    )
    losses = []
    for step in range(12):
        indices = torch.arange(8) + 8 * (step % 4)
        losses.append(float(pipe.train_batch(batch_of(data, indices[list(pipe.share(8))]), total=8)))
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
    planned = None if pipe.sync.auto is None else pipe.sync.auto.planned_at
    pipe.close()
    return losses, planned


def test_gradients_of_replicas_may_be_compressed_by_auto():
    dense, automatic = (run_ranks(_automatic, 4, compress) for compress in (None, "auto"))
    assert {tuple(losses) for losses, _ in automatic} == {tuple(automatic[0][0])}, "all ranks have the same loss"
    assert automatic[0][0] == pytest.approx(dense[0][0], rel=0.02)
    assert all(planned for _, planned in automatic), "a plan was found"


def _sent_while_frozen(rank, world):
    model, data = workload(VIT)
    pipe = Pipeline(Blocks.of(model), torch.optim.SGD(model.parameters(), lr=0.05), stages=2, compress="int8")
    sent = []
    for frozen in (0, 1, 0):
        freeze(pipe.blocks, frozen)
        pipe.train_batch(batch_of(data, torch.arange(4)), total=8)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
        pipe.sync.wait()
        sent.append({slot.name for unit in pipe.sync.units for slot in unit.slots})
    pipe.close()
    return sent


def test_frozen_parameters_of_a_stage_leave_the_plan_and_come_back():
    (whole, fewer, again), (behind, same, _), *_ = run_ranks(_sent_while_frozen, 4)
    assert fewer < whole, "of the first stage"
    assert again == whole
    assert same == behind, "the second stage trains on"


def _links(rank, world):
    network = measure_network(dist.group.WORLD, torch.device("cpu"))
    return network.latency, network.bytes_per_s


def test_the_network_is_measured_alike_on_all_ranks():
    first, second = run_ranks(_links, 2)
    assert first == second
    assert first[1] > 1e6
    assert first[0] < 0.1


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (16, 4)])
@pytest.mark.parametrize("spec", [VIT, BERT, LM])
def test_gradients_of_every_shape(ranks, stages, spec):
    most = len(Blocks.of(workload(spec)[0]).cut())
    schedules = [name for name, kind in SCHEDULES.items() if kind.per_rank * stages <= most]
    cases = [(spec, name, stages, frozen, 16) for name in schedules for frozen in (0, 3)]
    check(ranks, [*cases, (spec, "1f1b", stages, 1, 13)], timeout=300)
