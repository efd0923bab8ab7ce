"""Rivals (`horovod`, `byteps`, `ring-dgc`) against plain references, and the schedules of an ablation."""

import re
import time

import pytest
import torch
from torch import nn

from ranks import run_ranks
from syncline.errors import UsageError
from syncline.trace import Recorder
from syncline.train.strategies import Context, load
from syncline.train.strategies.ring_dgc import take_momentum


def _dgc(rank, world_size, options, steps):
    """For every step: this rank's gradients, the averaged ones, and the state after it."""
    model = nn.Linear(40, 30)
    generator = torch.Generator().manual_seed(rank)
    context = Context(rank=rank, workers=world_size, recorder=Recorder(rank=rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    synchroniser = load(f"ring-dgc({options})").attach(model, context, optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0
    found = []
    for step in range(steps):
        context.recorder.step = step
        model.zero_grad()
        x, target = torch.randn(5, 40, generator=generator), torch.randn(5, 30, generator=generator)
        synchroniser.backward((synchroniser.module(x) * target).sum())
        synchroniser.synchronise()
        own = {"weight": target.T @ x, "bias": target.sum(0)}
        averaged = {name: p.grad.clone() for name, p in model.named_parameters()}
        kept = {name: tensor.clone() for name, tensor in synchroniser.state_dict().items()}
        found.append([{name: tensor.tolist() for name, tensor in part.items()} for part in (own, averaged, kept)])
    synchroniser.load_state_dict({})
    assert not synchroniser.state_dict()
    synchroniser.load_state_dict(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in synchroniser.state_dict().items())
    synchroniser.close()
    return found


@pytest.mark.parametrize(("options", "clip", "ratios"), [
    ("ratio=0.05, warmup=0", None, [0.05] * 4),
    ("ratio=0.02, warmup=5, clip=2", 2.0, [0.25, 0.0625, 0.02, 0.02, 0.02, 0.02]),
])  # fmt: skip
def test_ring_dgc_is_the_published_algorithm(options, clip, ratios):
    ranks, world = run_ranks(_dgc, 3, options, len(ratios)), 3
    ranks = [[[{n: torch.tensor(v) for n, v in p.items()} for p in step] for step in steps] for steps in ranks]
    momentum, error = [torch.zeros(30, 40) for _ in range(world)], [torch.zeros(30, 40) for _ in range(world)]
    bias = torch.zeros(30)
    for step, ratio in enumerate(ratios):
        total = torch.zeros(30, 40)
        for rank in range(world):
            own, _, state = ranks[rank][step]
            gradient = own["weight"]
            if clip:
                gradient = gradient * min(1.0, clip / world**0.5 / float(gradient.norm()))
            momentum[rank] = 0.9 * momentum[rank] + gradient
            error[rank] = error[rank] + momentum[rank]
            sent = (state["weight.error"] == 0) & (error[rank] != 0)
            total += error[rank] * sent
            share = float(sent.float().mean())
            assert 0.5 * ratio < share < 1.3 * ratio, (step, rank, share)
            if ratio < 0.1:  # no list was full: then all that were sent are larger than all that were not
                assert error[rank][sent].abs().min() >= error[rank][~sent].abs().max()
            momentum[rank], error[rank] = momentum[rank] * ~sent, error[rank] * ~sent
            torch.testing.assert_close(state["weight.momentum"], momentum[rank])
            torch.testing.assert_close(state["weight.error"], error[rank])
        bias = 0.9 * bias + sum(ranks[rank][step][0]["bias"] for rank in range(world)) / world
        for rank in range(world):
            torch.testing.assert_close(ranks[rank][step][1]["weight"], total / world)
            torch.testing.assert_close(ranks[rank][step][1]["bias"], bias)


def test_ring_dgc_refuses_a_momentum_that_it_cannot_replace():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(UsageError, match="without nesterov"):
        take_momentum(optimizer)


def _overlaps(rank, world_size, spec):
    """Whether gradients of the deeper half were averaged before the backward pass of the first half had ended."""
    recorder = Recorder(rank=rank)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    context = Context(rank=rank, workers=world_size, recorder=recorder)
    synchroniser = load(spec).attach(nn.Sequential(first, second), context)
    seen = []
    hidden = first(torch.ones(2, 64))
    # The pass stops here, between the two layers, until the deeper gradients have been exchanged.
    hidden.register_hook(lambda _: _wait_for(lambda: {s.lane for s in recorder.spans()} >= {"exchange"}, seen))
    synchroniser.backward(second(hidden).sum())
    synchroniser.synchronise()
    synchroniser.close()
    return seen


def _wait_for(happened, seen):
    until = time.monotonic() + 20
    while not happened() and time.monotonic() < until:
        time.sleep(0.005)
    seen.append(happened())


@pytest.mark.parametrize("spec", ["horovod", "byteps", "ring-dgc"])
def test_rivals_exchange_during_the_backward_pass(spec):
    assert run_ranks(_overlaps, 2, spec) == [[True], [True]]


def _urgent(rank, world_size):
    """Order in which rounds of `byteps` send parameters that are all ready at once."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    recorder = Recorder(rank=rank)
    context = Context(rank=rank, workers=world_size, recorder=recorder)
    synchroniser = load("byteps(part_mb=0.0001, credit=1)").attach(model, context)
    sent, take = [], synchroniser._next_round

    def noted(waiting):
        taken = take(waiting)
        sent.extend(
            number
            for member in (taken.members if taken is not None else ())
            for number, (_, p) in enumerate(synchroniser.parameters)
            if member.untyped_storage().data_ptr() == p.grad.untyped_storage().data_ptr()
        )
        return taken

    synchroniser._next_round = noted
    synchroniser.synchronise()  # all gradients are there at once, as zeros
    synchroniser.close()
    return sent


def test_byteps_sends_first_what_the_next_forward_needs_first():
    for sent in run_ranks(_urgent, 2):
        assert sent == sorted(sent)
        assert sorted(set(sent)) == [0, 1, 2, 3]
        assert len(sent) > 4, "parameters are cut into partitions"


def _left_alone(rank, world_size, spec):
    model = nn.Linear(4, 4)
    synchroniser = load(spec).attach(model, Context(rank=rank, workers=world_size, recorder=Recorder(rank=rank)))
    if rank:
        synchroniser._groups.cut_agreements()  # as if this rank had died
        return None
    try:
        synchroniser.backward(model(torch.ones(1, 4)).sum())
        synchroniser.synchronise()
    except RuntimeError as error:
        return str(error)
    finally:
        synchroniser.close()


@pytest.mark.parametrize("spec", ["horovod", "byteps"])
def test_a_lost_peer_is_an_error_and_not_a_hang(spec):
    assert re.search("closed|reset", run_ranks(_left_alone, 2, spec)[0])


def _scheduled(rank, world_size, schedule):
    """The launch order of the plan, its units, and whether exchanges begin before all gradients are computed."""
    recorder = Recorder(rank=rank)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = Context(rank=rank, workers=world_size, recorder=recorder)
    synchroniser = load(f"syncline(schedule={schedule})").attach(model, context, optimizer)
    computed = []
    for parameter in model[0].parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: computed.append(time.perf_counter_ns()))
    for step in range(3):
        recorder.step = step
        optimizer.zero_grad()
        loss = synchroniser.forward((torch.ones(64, 300),), samples=torch.arange(64), view=0).sum()
        synchroniser.backward(loss)
        synchroniser.synchronise()
        optimizer.step()
    synchroniser.finish()
    plan = synchroniser.sync.plan
    synchroniser.close()
    begins = [s.start for s in recorder.spans() if s.step == 2 and s.lane == "exchange" and s.unit]
    return [name for name, _ in plan.order], len(plan.units), min(begins) < computed[-1]


@pytest.mark.parametrize(("schedule", "units"), [("serial", 4), ("fifo", 4), ("batched", 2)])
def test_schedules_switch_parts_of_the_engine_off(schedule, units):
    for order, count, overlaps in run_ranks(_scheduled, 2, schedule):
        assert count == units
        assert not (overlaps and schedule == "serial")
        if schedule != "batched":
            assert order == ["3", "2", "1", "0"], "in the order of the backward pass"
