"""Reshapes of real ranks: the run goes on as one process would, with optimizer state equal by value."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipelines import batch_of, freeze, workload

from ranks import run_ranks
from syncline.errors import UsageError
from syncline.pipeline import run
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.measure import measure_sublayers
from syncline.pipeline.run import Pipeline
from syncline.pipeline.schedule import SCHEDULES
from syncline.pipeline.transfer import checksum
from syncline.sim import Network
from syncline.trace import Recorder

SAMPLES = 9
# (frozen blocks, stages) of each part of the run, two steps each; the batches are ragged for some shapes
PARTS = [(0, 4), (1, 4), (2, 2), (3, 1), (1, 2)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _reference(model, data):
    """(losses, parameters, optimizer state by name) of the run in one process."""
    optimizer, losses = adamw(model), []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    for part, (frozen, _) in enumerate(PARTS):
        freeze(Blocks.of(model), frozen)
        for step in range(2):
            loss = model(*batch_of(data, torch.arange(SAMPLES) + SAMPLES * (2 * part + step)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters()), {n: optimizer.state[p] for n, p in model.named_parameters()}


def _run(rank, world, spec, schedule):
    torch.manual_seed(rank)
    model, data = workload(spec)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    groups = [id(group) for group in optimizer.param_groups]
    recorder = Recorder(rank=rank)
    pipe = Pipeline(Blocks.of(model), optimizer, stages=PARTS[0][1], schedule=schedule, recorder=recorder)
    made, losses = [dist.distributed_c10d._world.pg_map.copy()], []
    before = torch.get_rng_state()
    for part, (frozen, stages) in enumerate(PARTS):
        freeze(pipe.blocks, frozen)
        if stages != pipe.shape.stages:
            pipe.reshape(stages=stages)
            made.append(dist.distributed_c10d._world.pg_map.copy())
        for step in range(2):
            indices = torch.arange(SAMPLES) + SAMPLES * (2 * part + step)
            losses.append(float(pipe.train_batch(batch_of(data, indices[list(pipe.share(SAMPLES))]), total=SAMPLES)))
            pipe.clip_gradients(0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert torch.equal(torch.get_rng_state(), before), "a reshape draws no random numbers"
    assert [id(group) for group in optimizer.param_groups] == groups
    assert all((p in optimizer.state) == bool(p.numel()) for p in model.parameters()), "state of held parameters alone"
    old, *_, last = made
    gone = [group for group in old if group not in last and group is not dist.group.WORLD]
    spans = [span.unit for span in recorder.spans() if span.name == "reshape"]
    whole, right = pipe.state_dict(), pipe.evaluate(batch_of(data, torch.arange(10)))
    replicas = pipe.shape.replicas
    pipe.close()
    return len(gone), len(last), spans, losses, pickle.dumps(whole), right, replicas


VIT, LM = "vit(size=tiny)", "transformer(size=tiny, task=lm)"


@pytest.mark.parametrize(
    ("spec", "schedule"),
    [
        (VIT, "1f1b"),
        (LM, "gpipe"),
        *(pytest.param(VIT, name, marks=pytest.mark.full) for name in SCHEDULES if name != "1f1b"),
    ],
)
def test_a_run_with_reshapes_is_that_of_one_process(spec, schedule):
    results = run_ranks(_run, 4, spec, schedule)
    reference, data = workload(spec)
    losses, parameters, state = _reference(reference, data)
    whole, *others = (pickle.loads(result[4]) for result in results)
    assert others == [{}] * 3, "the whole state is on rank 0 alone"
    names = list(parameters)
    assert sorted(whole["model"]) == sorted(names)
    for number, name in enumerate(names):
        assert torch.allclose(whole["model"][name], parameters[name], rtol=0, atol=1e-9), name
        assert whole["optimizer"]["state"][number].keys() == state[name].keys()
        for key, value in whole["optimizer"]["state"][number].items():
            assert torch.allclose(value, state[name][key], rtol=0, atol=1e-9), (name, key)
    reference.eval()
    with torch.no_grad():
        correct, answers = reference.correct(*batch_of(data, torch.arange(10)))
    for gone, groups, spans, got, _, right, replicas in results:
        assert max(abs(a - b) for a, b in zip(got, losses, strict=True)) < 1e-9, "the loss is continuous"
        assert gone >= 2, "the first shape's groups are destroyed"
        assert groups <= 9, "groups do not pile up"
        assert spans == ["4x1 -> 2x2", "2x2 -> 1x4", "1x4 -> 2x2"]
        assert right[:2] == (replicas * int(correct), replicas * answers), "every replica evaluated the same batch"


def _residuals(rank, world):
    model, data = workload("vit(size=tiny)")
    pipe = Pipeline(
        Blocks.of(model), torch.optim.SGD(model.parameters(), lr=0.01), stages=2, compress="topk(ratio=0.1)", tune=False
    )

    def step(number):
        indices = torch.arange(SAMPLES) + SAMPLES * number
        loss = pipe.train_batch(batch_of(data, indices[list(pipe.share(SAMPLES))]), total=SAMPLES)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
        return float(loss)

    def mean_residuals():
        state, out = pipe.sync.state_dict(), {}
        for name, p in workload("vit(size=tiny)")[0].named_parameters():
            error = state.get(f"{name}.error")
            both = torch.zeros(1 + p.numel(), dtype=torch.float64)
            if error is not None:
                both = torch.cat([torch.ones(1, dtype=torch.float64), error.double().flatten()])
            dist.all_reduce(both)
            out[name] = both[1:] / both[0]
        return out

    losses = [step(n) for n in range(3)]
    before = mean_residuals()
    pipe.reshape(stages=1)
    after = mean_residuals()
    same = all(torch.allclose(before[name], after[name], rtol=0, atol=1e-15) for name in before)
    sizes = sum(float(t.abs().sum()) for t in before.values())
    losses += [step(n) for n in range(3, 6)]
    pipe.sync.wait()
    values = checksum(list(model.parameters()))
    pipe.close()
    return same, sizes, losses, values


def test_what_a_codec_still_owes_survives_a_reshape():
    results = run_ranks(_residuals, 4)
    assert len({values for *_, values in results}) == 1, "replicas are equal"
    for same, sizes, losses, _ in results:
        assert same
        assert sizes > 0
        assert max(losses) < 4


def _decide(rank, world):
    model, data = workload("vit(size=tiny)")
    blocks, batch = Blocks.of(model), batch_of(data, torch.arange(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = Pipeline(blocks, optimizer, stages=4, times=measure_sublayers(blocks, batch, repeats=1))
    before = checksum([p for p in model.parameters() if p.numel()])
    seconds = pipe.confirm_micro_batches(batch, most=2)
    unchanged = checksum([p for p in model.parameters() if p.numel()]) == before and pipe.steps == 0
    unchanged = unchanged and all(p.grad is None for p in model.parameters())
    chosen = pipe.micro_batches
    none = pipe.offer(steps_left=10**9, step_s=1.0)
    freeze(blocks, 3)
    refused = pipe.reshape_if_it_pays(steps_left=0, step_s=1.0)
    kept = str(pipe.shape)
    taken = pipe.reshape_if_it_pays(steps_left=10**9, step_s=1.0)
    now, micro = str(pipe.shape), pipe.micro_batches
    loss = float(pipe.train_batch(batch_of(data, torch.arange(8)[list(pipe.share(8))]), total=8))
    pipe.close()
    return seconds, unchanged, chosen, none, refused, kept, taken, now, micro, loss


def test_micro_batches_are_simulated_and_timed_and_reshapes_are_taken_if_they_pay():
    results = run_ranks(_decide, 4)
    assert len({str(result) for result in results}) == 1, "all ranks decide alike"
    seconds, unchanged, chosen, none, refused, kept, taken, now, micro, _ = results[0]
    assert unchanged, "timing steps update nothing"
    assert len(seconds) == 2
    assert chosen == min(seconds, key=seconds.get)
    assert none is None or str(none.new) == "4x1", "the whole model trains: no stage can be saved"
    assert (refused.pays, kept) == (False, "4x1")
    assert (taken.pays, str(taken.new), now) == (True, now, "1x4")
    assert taken.payback_steps > 0
    assert micro == 1


def _confirm(rank, world):
    torch.manual_seed(0)
    calls = []

    class Counting(Pipeline):
        def confirm_micro_batches(self, *args, **options):
            calls.append(str(self.shape))
            return super().confirm_micro_batches(*args, **options)

    def built():
        model, data = workload("vit(size=tiny)")
        blocks = Blocks.of(model)
        batch = batch_of(data, torch.arange(8))
        times = measure_sublayers(blocks, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Counting(blocks, optimizer, stages=2, confirm=True, times=times), batch

    pipe, batch = built()
    for _ in range(2):
        pipe.train_batch(batch)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
    first = pipe.micro_batches
    state = [pipe.state_dict()]
    dist.broadcast_object_list(state, src=0)
    pipe.reshape(stages=1)
    pipe.train_batch([part[list(pipe.share(8))] for part in batch], total=8)
    steps = pipe.steps
    pipe.close()
    again, _ = built()
    again.load_state_dict(state[0])
    again.train_batch(batch)
    kept = again.micro_batches
    again.close()
    return calls, first, kept, steps


def test_every_shape_is_timed_once_and_a_checkpoint_keeps_the_number_of_micro_batches():
    for calls, first, kept, steps in run_ranks(_confirm, 2):
        assert calls == ["2x1", "1x2"], "not again after loading"
        assert kept == first
        assert steps == 3, "timing steps do not count"


def _losses_of_one_process(steps):
    model, data = workload(VIT)
    optimizer, losses = adamw(model), []
    for step in range(steps):
        loss = model(*batch_of(data, torch.arange(SAMPLES) + SAMPLES * step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class _ClockOfShapes:
    """A clock by which steps of the given number of stages are the fastest."""

    fastest, pipe = 1, None

    def __init__(self, device):
        pass

    def mark(self):
        return 0.0

    def seconds(self, start, end):
        return 1.0 if _ClockOfShapes.pipe.shape.stages == self.fastest else 2.0


def _choosing(rank, world, fastest):
    run.DeviceClock, _ClockOfShapes.fastest = _ClockOfShapes, fastest
    model, data = workload(VIT)
    optimizer, recorder = adamw(model), Recorder(rank=rank)
    blocks = Blocks.of(model)
    times = measure_sublayers(blocks, batch_of(data, torch.arange(8)))
    network = Network(latency=0.0, bytes_per_s=1e6)  # exchanges are expensive, so that a pipeline is worth a trial
    pipe = Pipeline(blocks, optimizer, stages=None, times=times, network=network, recorder=recorder)
    _ClockOfShapes.pipe, losses, trying = pipe, [], []
    for step in range(8):
        trying.append(pipe.state_dict().get("trying_shapes"))
        pipe.tune_shape()
        indices = torch.arange(SAMPLES) + SAMPLES * step
        losses.append(float(pipe.train_batch(batch_of(data, indices[list(pipe.share(SAMPLES))]), total=SAMPLES)))
        optimizer.step()
        optimizer.zero_grad()
    spans = [span.unit for span in recorder.spans() if span.name == "reshape"]
    stages = pipe.shape.stages
    pipe.close()
    return losses, spans, stages, trying


@pytest.mark.parametrize("fastest", [1, 2])
def test_the_first_steps_choose_the_fastest_shape_and_are_those_of_one_process(fastest):
    results = run_ranks(_choosing, 2, fastest)
    for losses, *_ in results:
        assert losses == pytest.approx(_losses_of_one_process(8), abs=1e-9)
    for _, spans, stages, _ in results:
        assert spans == ["1x2 -> 2x1", "2x1 -> 1x2"][: 3 - fastest], "the start, the other shape, the fastest"
        assert stages == fastest
    assert results[0][3] == [True] * 7 + [False], "a checkpoint knows whether the shape is chosen"


def _resuming_while_choosing(rank, world, folder):
    run.DeviceClock, _ClockOfShapes.fastest = _ClockOfShapes, 2
    losses, stages, done = [], [], 0
    for steps in (2, 5, 1):  # in the shape of the start, until the trial is over, after it
        model, data = workload(VIT)
        optimizer, blocks = adamw(model), Blocks.of(model)
        times = measure_sublayers(blocks, batch_of(data, torch.arange(8)))
        network = Network(latency=0.0, bytes_per_s=1e6)
        pipe = Pipeline(blocks, optimizer, stages=None, confirm=True, times=times, network=network)
        _ClockOfShapes.pipe = pipe
        if done:
            pipe.load(Path(folder) / f"{done}.pt")
        for step in range(done, done + steps):
            pipe.tune_shape()
            indices = torch.arange(SAMPLES) + SAMPLES * step
            losses.append(float(pipe.train_batch(batch_of(data, indices[list(pipe.share(SAMPLES))]), total=SAMPLES)))
            optimizer.step()
            optimizer.zero_grad()
            stages.append(pipe.shape.stages)
        done += steps
        pipe.save(Path(folder) / f"{done}.pt")
        trying = pipe.trying_shapes
        pipe.close()
    return losses, stages, trying


def test_a_resumed_trial_of_shapes_begins_again_and_changes_no_value(tmp_path):
    results = run_ranks(_resuming_while_choosing, 2, str(tmp_path))
    for losses, *_ in results:
        assert losses == pytest.approx(_losses_of_one_process(8), abs=1e-9)
    for _, stages, trying in results:
        assert stages[:5] == [1, 1, 1, 1, 1], "three steps more without stages after the first checkpoint"
        assert stages[5:7] == [2, 2], "then the other shape"
        assert stages[7] == 1, "a start without stages tries again where the checkpoint had stages"
        assert trying


def test_a_shape_is_chosen_by_measured_times():
    model, _ = workload(VIT)
    with pytest.raises(UsageError, match="give times=measure_sublayers"):
        Pipeline(Blocks.of(model), adamw(model), stages=None)
