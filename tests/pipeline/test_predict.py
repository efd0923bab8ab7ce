"""Predicted steps against closed forms, micro-batches, the decision to reshape, and measured sublayers."""

import pytest
import torch
from pipelines import batch_of, freeze, workload

from syncline.errors import UsageError
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.layout import Layout
from syncline.pipeline.layout_choice import LayoutChoice
from syncline.pipeline.measure import measure_sublayers, wire_of
from syncline.pipeline.mesh import Shape, share
from syncline.pipeline.micro_batch_choice import MicroBatchChoice
from syncline.pipeline.micro_batches import split
from syncline.pipeline.partition import balanced
from syncline.pipeline.predict import (
    DENSE,
    StageTime,
    SublayerTime,
    Time,
    Wire,
    best_micro_batches,
    costs_of,
    makespan,
    predict_step,
)
from syncline.pipeline.reshape import Offer, ReshapeCosts, largest_stage, smallest_shape
from syncline.pipeline.schedule import check_micro_batches
from syncline.sim import Network

FREE = Network(latency=0.0, bytes_per_s=1e30)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 2), (4, 4), (4, 16)])
def test_equal_stages_take_the_time_of_the_closed_form(schedule, stages, micro):
    times = [StageTime(1.0, 2.0)] * stages
    assert makespan(times, range(stages), micro, schedule=schedule) == pytest.approx((micro + stages - 1) * 3.0)


def test_interleaving_zero_bubbles_and_frozen_stages_make_the_step_shorter():
    plain = makespan([StageTime(2.0, 4.0)] * 4, range(4), 8, schedule="1f1b")
    halves, positions = [StageTime(1.0, 2.0)] * 8, [0, 1, 2, 3] * 2
    interleaved = makespan(halves, positions, 8, schedule="interleaved")
    assert interleaved < plain
    assert makespan(halves, positions, 8, schedule="zero-bubble") < interleaved
    assert makespan(halves, positions, 8, schedule="zero-bubble") >= 8 * 6.0, "nobody beats a rank that never waits"
    frozen = makespan([StageTime(2.0, 4.0)] * 4, range(4), 8, schedule="1f1b", frozen=2)
    assert frozen < plain
    assert frozen >= 8 * 6.0


def layout(count, stages, replicas, schedule="1f1b"):
    return Layout(Shape(stages, replicas), schedule, balanced([1.0] * count, stages))


def test_more_micro_batches_fill_the_pipeline_until_their_fixed_cost_counts():
    def best(fixed):
        times = [SublayerTime(Time(fixed, 1.0), Time(fixed, 2.0))] * 8
        return best_micro_batches(times, layout(8, 4, 1), frozen=0, samples=64, network=FREE)[0][1]

    assert best(0.0) == 32
    assert best(1.0) < 32
    assert best(100.0) == 4


def test_the_exchange_of_replicas_is_part_of_the_step():
    times = [SublayerTime(Time(0.0, 1.0), Time(0.0, 2.0), gradient_bytes=1000)] * 4
    network = Network(latency=0.0, bytes_per_s=1000.0)
    one = predict_step(times, layout(4, 2, 1), frozen=0, samples=8, micro_batches=4, network=FREE)
    two = predict_step(times, layout(4, 2, 2), frozen=0, samples=16, micro_batches=4, network=network)
    assert two == pytest.approx(one + 2.0), "a ring of two sends the 2000 bytes of a stage once"
    half = predict_step(times, layout(4, 2, 2), frozen=3, samples=16, micro_batches=4, network=network)
    assert half < two
    assert costs_of(times, frozen=1, rows=2) == [2.0, 6.0, 6.0, 6.0]


def test_a_codec_sends_less_and_without_stages_the_backward_pass_hides_it():
    times = [SublayerTime(Time(0.0, 1.0), Time(0.0, 2.0), gradient_bytes=1000)] * 4
    network = Network(latency=0.0, bytes_per_s=100.0)

    def step(stages, wire):
        shape = layout(4, stages, 2)
        return predict_step(times, shape, frozen=0, samples=8, micro_batches=stages, network=network, wire=wire)

    dense, half = DENSE, Wire("allreduce", 0.5)
    assert step(2, dense) - step(2, half) == pytest.approx(10.0), "half of 2000 bytes"
    assert step(1, dense) == pytest.approx(16 + 40), "4000 bytes take longer than the backward pass"
    assert step(1, Wire("allreduce", 0.1)) == pytest.approx(16 + 32), "these do not"
    matrix, vector = torch.empty(100, 100), torch.empty(100)
    assert wire_of([matrix, vector], None) == dense
    assert wire_of([matrix, vector], "auto") == wire_of([matrix, vector], "bf16") == half
    assert 0.02 < wire_of([matrix, vector], "powersgd(rank=1)").share < 0.04
    assert wire_of([matrix, vector], "int8").exchange != "allreduce", "its values are not sums"


def test_a_cache_costs_what_reading_takes():
    times = [SublayerTime(Time(0.0, 1.0), Time(0.0, 2.0))] * 4

    def step(cached):
        return predict_step(times, layout(4, 1, 1), frozen=3, samples=8, micro_batches=1, network=FREE, cached=cached)

    assert step(None) == 4 * 8 + 2 * 8
    assert step(0.0) == 8 + 2 * 8
    assert step(0.5) == 4 + 8 + 2 * 8


def test_a_number_of_micro_batches_belongs_to_the_shape_it_was_found_for():
    choice = MicroBatchChoice("1f1b", None, confirm=True)
    choice.resume(Shape(2, 2), 2)
    assert choice.number(Shape(2, 2)) == 2
    choice.check(Shape(4, 1))  # two would be too few for four stages
    assert choice.number(Shape(4, 1)) == 8
    assert choice.number(Shape(2, 2)) == 2
    asked = MicroBatchChoice("1f1b", 2, confirm=True)
    assert not asked.runs_in(Shape(4, 1)), "the user's number counts in every shape"


def test_shapes_that_the_schedule_cannot_run_are_not_offered():
    blocks = Blocks.of(workload("vit(size=tiny)")[0])
    times = [SublayerTime(Time(0.0, 1.0), Time(0.0, 2.0))] * len(blocks.cut())
    choice = LayoutChoice(blocks, Shape(4, 1), schedule="1f1b", times=times, network=FREE, wire=DENSE, cached=None)
    choice.samples = 64
    now = choice.lay_out(Shape(4, 1))
    freeze(blocks, 3)

    def offered(runs):
        return choice.offer(now, step_s=1.0, costs=ReshapeCosts(0.0), steps_left=10**6, runs=runs)

    assert offered(lambda shape: True).new.stages == 1
    assert offered(lambda shape: shape.stages > 1).new.stages == 2


def test_the_cost_of_a_change_has_the_timing_of_micro_batches_in_it():
    costs = ReshapeCosts(3.0)
    costs.add(1.0)
    assert costs.of(changes_shape=True) == (4.0, True)
    costs.measured(0.5, changes_shape=False)
    costs.add(0.25)
    assert costs.of(changes_shape=False) == (0.75, False)


def test_a_reshape_is_taken_if_the_rest_of_the_run_pays_for_it():
    offer = Offer(Shape(4, 1), Shape(2, 2), step_s=1.0, new_step_s=0.5, cost_s=10.0, steps_left=19)
    assert not offer.pays
    assert offer.payback_steps == 20
    assert Offer(Shape(4, 1), Shape(2, 2), 1.0, 0.5, 10.0, steps_left=21).pays
    assert not Offer(Shape(4, 1), Shape(2, 2), 1.0, 1.5, 0.0, steps_left=21).pays
    assert str(offer) == "reshape 4x1 -> 2x2 does not pay: 1000.0 -> 500.0 ms per step, 19 steps left, cost 10.00 s"


def test_stages_halve_while_the_training_part_fits_where_the_whole_model_did():
    sizes = [1.0] * 16
    limit = largest_stage(sizes, 4)
    shapes = [str(smallest_shape(sizes, Shape(4, 2), frozen=n, limit=limit)) for n in (0, 7, 8, 11, 12, 16)]
    assert shapes == ["4x2", "4x2", "2x4", "2x4", "1x8", "1x8"]


def test_shapes_and_shares_use_every_rank_and_every_sample():
    assert [Shape.of(8, 2).place(rank) for rank in (0, 1, 2, 7)] == [(0, 0), (0, 1), (1, 0), (3, 1)]
    assert [n for replica in range(4) for n in share(10, replica, 4)] == list(range(10))
    with pytest.raises(UsageError, match="use a divisor of 8"):
        Shape.of(8, 3)
    with pytest.raises(UsageError, match="use 8"):
        check_micro_batches("1f1b", 3, ranks=4)


@pytest.mark.parametrize("samples", [0, 1, 5, 8])
def test_ragged_batches_are_padded_and_no_sample_is_lost(samples):
    x, y = torch.arange(2.0 * samples).view(samples, 2), torch.arange(samples)
    made = split((x, y), 4, rows=2)
    assert made.samples == samples
    assert all(part.shape == (2, 2) for part, _ in made.parts)
    real = [y_part[:count] for (_, y_part), count in zip(made.parts, made.counts, strict=True)]
    assert torch.equal(torch.cat(real), y)


def test_measuring_sublayers_leaves_the_model_as_it_was():
    model, data = workload("vit(size=tiny)")
    blocks, before = Blocks.of(model), torch.get_rng_state()
    times = measure_sublayers(blocks, batch_of(data, range(8)), repeats=1)
    assert len(times) == len(blocks.cut())
    assert all(t.forward.of(8) > 0 for t in times)
    assert times[1].backward.of(8) > 0
    assert sum(t.gradient_bytes for t in times) == sum(8 * p.numel() for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_shapes_worth_a_trial_are_one_stage_and_a_pipeline_that_is_not_much_slower():
    blocks = Blocks.of(workload("vit(size=tiny)")[0])
    count = len(blocks.cut())

    def shapes(forward, gradient_bytes, *, schedule="1f1b", world=4, runs=lambda shape: True):
        times = [SublayerTime(Time(0.0, forward), Time(0.0, 2 * forward), gradient_bytes)] * count
        network = Network(latency=0.0, bytes_per_s=1e9)
        choice = LayoutChoice(
            blocks, Shape(1, world), schedule=schedule, times=times, network=network, wire=DENSE, cached=None
        )
        choice.samples = 64
        return [shape.stages for shape in choice.shapes_to_try(runs)]

    assert shapes(1e-3, 4) == [1, 2], "exchanges cost nothing: the shallowest pipeline wastes least"
    assert shapes(1e-9, 4 * 10**9)[0] == 1, "the start is always timed"
    assert len(shapes(1e-9, 4 * 10**9)) == 2, "large gradients, little work: a pipeline may win"
    assert shapes(1e-3, 4, runs=lambda shape: shape.stages == 1) == [1], "what the schedule cannot run is not tried"
    assert shapes(1e-3, 4, schedule="interleaved", world=count) == [1], "two stages per rank need twice the sublayers"
