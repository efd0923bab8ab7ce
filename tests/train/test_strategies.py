"""One conformance suite: every registered strategy passes the same tests; a new one adds a line to `SPECS`."""

import copy
import re
import time

import pytest
import torch
from torch import nn

from ranks import run_ranks
from syncline.errors import UsageError
from syncline.trace import Recorder
from syncline.train.checkpoint.history import History
from syncline.train.config import Train
from syncline.train.data.sampler import Sampler
from syncline.train.rank.loop import Loop
from syncline.train.rank.step_log import StepLog
from syncline.train.strategies import STRATEGIES, Context, load
from syncline.train.strategies.classical import ring_order_sum
from syncline.train.workload import build, load_optimizer

# strategy: (workers, relative tolerance of the mean)
SPECS = {
    "single": (1, 0.0),
    "local": (1, 0.0),  # several ranks drift apart: that is what it is for
    "gather-scatter": (3, 1e-6),
    "all-reduce": (3, 1e-6),
    "ring": (3, 1e-6),
    "server": (2, 1e-6),
    "server(servers=2, part_mb=0.0001)": (2, 1e-6),
    "ddp": (3, 1e-6),
    "ddp(bucket_mb=0.001)": (2, 1e-6),
    "ddp(static_graph=true)": (2, 1e-6),
    "ddp-bf16": (3, 2e-2),
    "ddp-fp16": (3, 2e-3),
    "ddp-powersgd(rank=2)": (2, 1e-6),  # dense in its first steps
    "ddp-powersgd(rank=2, batch=true)": (2, 1e-6),
    "horovod": (3, 1e-6),
    "horovod(fusion_mb=0.0001, cycle_ms=0)": (2, 1e-6),
    "byteps": (3, 1e-6),
    "byteps(part_mb=0.00002, credit=2)": (4, 1e-6),
    "ring-dgc(ratio=1, warmup=0)": (3, 1e-6),
    "syncline": (3, 1e-6),
    "syncline(schedule=serial)": (2, 1e-6),
    "syncline(schedule=fifo)": (2, 1e-6),
    "syncline(schedule=ordered)": (2, 1e-6),
    "syncline(schedule=batched)": (2, 1e-6),
    "syncline(schedule=barrier)": (2, 1e-6),
    "syncline(bf16, carrier=ring)": (2, 2e-2),
    "syncline(bf16, hierarchical(node=2))": (3, 2e-2),
    "syncline(none, server(servers=2, dedicated=true))": (2, 1e-6),
    "syncline(warmup(powersgd(rank=2), steps=2))": (3, 1e-6),  # dense in its first steps
}

ALONE = {"single", "local"}

MODELS = (
    "mlp",
    "vgg11(width=0.0625)",
    "vgg19(width=0.03125)",
    "resnet50(width=0.0625)",
    "vit(size=tiny)",
    "bert(size=tiny)",
    "bert(size=tiny, head=qa)",
    "bert(size=tiny, head=pretraining)",
    "transformer(size=tiny)",
    "transformer(size=tiny, task=lm)",
    "lstm(size=tiny)",
    "ugatit-light(size=tiny)",
)

DATA = {"vgg19(width=0.03125)": "shapes", "resnet50(width=0.0625)": "shapes"}


class Tiny(nn.Module):
    """Odd sizes, a tensor smaller than the world, and one parameter that is never used."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.spare = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return (self.b(torch.tanh(self.a(x))) * self.scale).pow(2).mean()


def _mean(rank, world_size, spec, workers):
    strategy, recorder = load(spec), Recorder(rank=rank)
    torch.manual_seed(0)
    model = Tiny()
    if spec.startswith("ddp"):
        del model.spare  # torch's DDP refuses unused parameters
        model.spare = None
    group = torch.distributed.new_group(list(range(workers)))
    context = Context(rank=rank, workers=workers, recorder=recorder, group=group)
    if rank >= workers:
        strategy.serve([model], context, steps=2)
        return None
    shards = [torch.randn(4, 7, generator=torch.Generator().manual_seed(r)) for r in range(workers)]
    expected = copy.deepcopy(model).double()
    (sum(expected(shard.double()) for shard in shards) / workers).backward()
    synchroniser = strategy.attach(model, context)
    for step in range(2):
        recorder.step = step
        model.zero_grad(set_to_none=True)
        synchroniser.backward(synchroniser.module(shards[rank]))
        synchroniser.synchronise()
    errors = {}
    for (name, parameter), (_, reference) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        want = torch.zeros_like(reference) if reference.grad is None else reference.grad
        if parameter.grad is None:
            assert want.abs().max() == 0
            continue
        errors[name] = float((parameter.grad - want).norm() / max(want.norm(), 1e-12))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads]).tolist()
    synchroniser.close()
    return errors, flat, {s.lane for s in recorder.spans()}


def test_every_registered_strategy_is_in_the_table():
    assert {spec.partition("(")[0] for spec in SPECS} == set(STRATEGIES.names())


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_the_mean_and_equal_on_all_ranks(spec):
    workers, tolerance = SPECS[spec]
    servers = load(spec).servers
    results = run_ranks(_mean, workers + servers, spec, workers)[:workers]
    for errors, gradients, lanes in results:
        assert max(errors.values()) <= max(tolerance, 1e-6), errors
        assert gradients == results[0][1], "ranks disagree"
        expected = {"backward"} if spec in ALONE else {"backward", "exchange"}
        if spec.startswith("syncline"):
            expected |= {"encode", "decode"}
        assert lanes - {"wait"} == expected


def _both_sums(rank, world_size):
    equal = []
    for size in (0, 1, 5, 100, 4099, 300_001, 2_359_297):
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        reduced = parts[rank].clone()
        torch.distributed.all_reduce(reduced)
        equal.append(torch.equal(ring_order_sum(parts), reduced))
    return equal


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_gather_scatter_adds_in_the_order_of_gloos_all_reduce_bit_for_bit(world_size):
    assert all(all(equal) for equal in run_ranks(_both_sums, world_size))


def _train(rank, world_size, spec, models, workers, folder):
    from pathlib import Path

    strategy = load(spec)
    group = torch.distributed.new_group(list(range(workers)))
    seen = {}
    for model in dict.fromkeys(models):
        recorder = Recorder(rank=rank)
        context = Context(rank=rank, workers=workers, recorder=recorder, group=group)
        workload = build(model, DATA.get(model, "auto"), seed=1)
        if rank >= workers:
            strategy.serve([phase.module for phase in workload.phases], context, steps=2)
            continue
        trainable = [[p for p in phase.module.parameters() if p.requires_grad] for phase in workload.phases]
        optimizers = [load_optimizer(phase.optimizer, phase.module.parameters()) for phase in workload.phases]
        pairs = zip(workload.phases, optimizers, strict=True)
        loop = Loop(
            workload=workload,
            synchronisers=[strategy.attach(phase.module, context, optimizer) for phase, optimizer in pairs],
            optimizers=optimizers,
            sampler=Sampler(len(workload.train), batch=4 * workers, seed=1, rank=rank, workers=workers),
            context=context,
            device=torch.device("cpu"),
            train=Train(epochs=1, test_samples=4),
            steps=2,
            count_network=False,
            checkpoint=lambda loop, history: None,
            log=StepLog(
                Path(folder) / f"{rank}.jsonl",
                recorder,
                batch=4 * workers,
                phases=len(workload.phases),
                steps=1,
                log_every=0,
                progress=lambda _: None,
            ),
        )
        before = [p.detach().clone() for parameters in trainable for p in parameters]
        history = History()
        loop.run(history)
        after = [p.detach() for parameters in trainable for p in parameters]
        moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        checksum = [float(p.double().sum()) for p in after]
        seen[model] = (history.losses, moved / len(after), checksum)
        for synchroniser in loop.synchronisers:
            synchroniser.close()
    return seen


WHOLE_TABLE = [s for s in SPECS if not re.search("part_mb|bucket|static|batch|fusion|schedule", s)]


def models_of(spec):
    """All models under `all-reduce`, another one under each of the others, two also with the last one."""
    if spec == "all-reduce":
        return MODELS
    return [MODELS[WHOLE_TABLE.index(spec) % (len(MODELS) - 1)], *[MODELS[-1]] * (spec in ("ddp", "syncline"))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("spec", "models"),
    [(s, models_of(s)) for s in WHOLE_TABLE]
    + [pytest.param(s, MODELS, marks=pytest.mark.full) for s in WHOLE_TABLE if s != "all-reduce"],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_models_train_under_strategies(spec, models, tmp_path):
    workers = 1 if spec in ALONE else 2
    arguments = (spec, models, workers, str(tmp_path))
    results = run_ranks(_train, workers + load(spec).servers, *arguments, timeout=240)[:workers]
    for model in models:
        for losses, moved, checksum in (result[model] for result in results):
            assert len(losses) == 2, model
            assert all(abs(loss) < 1e4 for loss in losses), (model, losses)
            assert moved > 0.8, (model, moved)
            assert checksum == results[0][model][2], f"{model}: parameters differ between ranks"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dpp", "did you mean 'ddp'"),
        ("server(servers=0)", "servers >= 1"),
        ("ddp-powersgd(rank=0)", "rank >= 1"),
        ("ddp(bucket_mb=0)", "must be positive"),
        ("horovod(fusion_mb=0)", "fusion_mb > 0"),
        ("byteps(credit=0)", "credit >= 1"),
        ("ring-dgc(ratio=2)", "ratio in 0..1"),
        ("syncline(schedule=ffio)", "did you mean 'fifo'"),
        ("syncline(auto, schedule=fifo)", "leave auto and file out"),
        ("ring(x=1)", "takes"),
        ("ddp | ring", "is a chain"),
    ],
)
def test_wrong_strategies_are_usage_errors(spec, message):
    with pytest.raises(UsageError, match=message):
        load(spec)


def test_theory_of_the_wire():
    shapes, element = [torch.Size([100, 10]), torch.Size([24])], 4
    size = 1024 * 4

    def traffic(spec, rank=0, workers=4):
        return load(spec).traffic(shapes, element, rank=rank, workers=workers)

    assert traffic("gather-scatter").serial == 2 * 3 * size
    assert traffic("gather-scatter", rank=1).serial == 2 * size
    assert traffic("all-reduce").serial == traffic("ring").sent == traffic("ddp").received == 2 * 3 / 4 * size
    assert traffic("ddp-bf16").serial == 3 / 4 * size
    assert traffic("server(servers=2)", rank=4).serial == 4 * size / 2
    assert traffic("server(servers=2)").serial == size
    assert traffic("ddp-powersgd(rank=2)").serial == 2 * 3 / 4 * (2 * 110 + 24) * 4
    assert traffic("single", workers=1).serial == 0


def _bucket_bytes(rank, world_size, spec):
    recorder = Recorder(rank=rank)
    model = nn.Linear(100, 10)
    context = Context(rank=rank, workers=world_size, recorder=recorder, group=torch.distributed.group.WORLD)
    synchroniser = load(spec).attach(model, context)
    for step in range(4):
        recorder.step = step
        synchroniser.backward(synchroniser.module(torch.randn(4, 100)).sum())
        synchroniser.synchronise()
    synchroniser.close()
    spans = [s for s in recorder.spans() if s.lane == "exchange" and s.unit != "buffers"]
    return [sum(s.bytes for s in spans if s.step == step) for step in (0, 3)]


@pytest.mark.parametrize(
    ("spec", "bytes_of_first_and_last_step"),
    [
        ("ddp", [1010 * 4, 1010 * 4]),
        ("ddp-bf16", [1010 * 2, 1010 * 2]),
        ("ddp-powersgd(rank=2)", [1010 * 4, (2 * 110 + 10) * 4]),  # dense in its first steps
    ],
)
def test_spans_of_ddp_have_the_bytes_that_its_hook_sends(spec, bytes_of_first_and_last_step):
    assert run_ranks(_bucket_bytes, 2, spec)[0] == bytes_of_first_and_last_step


def _late_for_buffers(rank, world_size):
    recorder = Recorder(rank=rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    context = Context(rank=rank, workers=world_size, recorder=recorder, group=torch.distributed.group.WORLD)
    synchroniser = load("ddp").attach(model, context)
    synchroniser.module(torch.ones(4, 4))
    if rank == 0:
        time.sleep(0.05)
    with recorder.span("forward"):
        synchroniser.module(torch.ones(4, 4))
    synchroniser.close()
    forward = sum(span.end - span.start for span in recorder.spans() if span.lane == "forward")
    buffers = [span.end - span.start for span in recorder.spans() if span.unit == "buffers"]
    return forward / 1e6, buffers[-1] / 1e6


@pytest.mark.alone
def test_waiting_for_buffers_inside_forward_is_no_forward_work_with_ddp():
    (_, _), (forward, buffers) = run_ranks(_late_for_buffers, 2)
    assert buffers > 40
    assert forward < 30
