"""Every model builds, learns, and gives every parameter of a phase a gradient; published shapes are exact."""

import math

import pytest
import torch
from workload_cases import TINY, train

from syncline.errors import UsageError
from syncline.train.workload import MODELS, build, load_optimizer

# facts: total MiB, largest MiB, gradients; the published parameter count where there is one.
PUBLISHED = [
    ("vgg19", "synthetic", 143_667_240, 548, 392, 38),
    ("resnet50", "synthetic", 25_557_032, 97, 9, 161),
    ("vit(size=b16)", "synthetic", 86_567_656, 330, 9, 152),
    ("bert(size=base, head=pretraining)", "synthetic", 110_106_428, 420, 89, 206),
    ("transformer(size=base)", "synthetic", 61_399_040, 234, 66, 185),
    ("gpt2(size=small)", "synthetic", 124_439_808, 475, 147, 148),
    ("lstm(size=paper)", "synthetic", 85_974_278, 328, 190, 10),
    ("ugatit-light(size=paper)", "unpaired", 134_021_248, 511, 128, 148),
]


def test_every_model_is_in_the_table() -> None:
    assert {model.split("(")[0] for model, _ in TINY} == set(MODELS.names())


@pytest.mark.parametrize(("model", "data"), TINY)
def test_trains(model: str, data: str) -> None:
    workload = build(model, data, seed=1)
    losses = train(workload, steps=2)
    assert all(math.isfinite(loss) for row in losses for loss in row)
    for phase in workload.phases:
        missing = [name for name, p in phase.module.named_parameters() if p.grad is None]
        assert missing == []
        assert all(p.grad is not None and p.grad.isfinite().all() for p in phase.module.parameters())
    if workload.evaluate is not None:
        assert workload.test is not None
        right, count = workload.evaluate(workload.test.batch(torch.arange(3)))
        assert 0 <= right <= count
        assert count > 0
        assert workload.phases[0].module.training


@pytest.mark.parametrize(("model", "data"), [TINY[0], TINY[4], TINY[5], TINY[10]])
def test_the_loss_falls(model: str, data: str) -> None:
    losses = train(build(model, data), steps=12)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize(("model", "data"), TINY)
def test_a_seed_fixes_the_parameters_and_leaves_the_global_state(model: str, data: str) -> None:
    before = torch.get_rng_state()
    one, two, other = (build(model, data, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.phases, two.phases, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.module.parameters(), b.module.parameters(), strict=True))
        assert all(torch.equal(p, q) for p, q in zip(a.module.buffers(), b.module.buffers(), strict=True))
    pairs = zip(one.phases[0].module.parameters(), other.phases[0].module.parameters(), strict=True)
    assert any(not torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize(("model", "data", "count", "total", "largest", "gradients"), PUBLISHED)
def test_published_shapes(model: str, data: str, count: int, total: int, largest: int, gradients: int) -> None:
    with torch.device("meta"):
        workload = build(model, data)
    sizes = [p.numel() for phase in workload.phases for p in phase.module.parameters()]
    mebi = 4 / 2**20
    assert sum(sizes) == count
    assert len(sizes) == gradients
    assert round(max(sizes) * mebi) == largest
    assert int(sum(sizes) * mebi) in (total, total - 1)


def test_the_course_vgg11() -> None:
    with torch.device("meta"):
        module = build("vgg11").phases[0].module
    convolutions = [m.out_channels for m in module.modules() if isinstance(m, torch.nn.Conv2d)]
    assert convolutions == [64, 128, 256, 256, 512, 512, 512, 512]
    assert sum(isinstance(m, torch.nn.BatchNorm2d) for m in module.modules()) == 8
    assert [m.weight.shape for m in module.modules() if isinstance(m, torch.nn.Linear)] == [(10, 512)]


def test_vit_b16_has_27_units() -> None:
    with torch.device("meta"):
        net = build("vit(size=b16)").phases[0].module.net
    assert len(list(net.children())) == 27


def test_dropout_is_off_in_evaluation() -> None:
    workload = build("vgg19(width=0.03125)", "shapes")
    assert workload.evaluate is not None
    batch = workload.train.batch(torch.arange(8))
    assert workload.evaluate(batch) == workload.evaluate(batch)


@pytest.mark.parametrize("model", ["mlp", "bert(layers=1)", "transformer(task=translation)"])
def test_shards_average_to_the_whole_batch(model: str) -> None:
    """The mean of equal shards' losses is the whole batch's loss: what makes strategies comparable."""
    data = "shapes" if model == "mlp" else "text(megabytes=0.3)"
    module = build(model, data).phases[0].module
    samples = build(model, data).train
    whole = module(*samples.batch(torch.arange(8))).item()
    parts = [module(*samples.batch(torch.arange(k, k + 4))).item() for k in (0, 4)]
    assert sum(parts) / 2 == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("vgg111", "auto", "did you mean 'vgg11'"),
        ("vgg11(depth=3)", "auto", r"vgg11 takes \(width=1.0"),
        ("vgg11(width=0)", "auto", "a factor above 0"),
        ("vgg11", "shapes(image_size=48)", "multiple of 32"),
        ("vit(size=huge)", "auto", "tiny, small, b16"),
        ("vit", "shapes(image_size=33)", "multiple of 4"),
        ("bert(head=nothing)", "auto", "classification, qa, pretraining"),
        ("bert(head=qa)", "text(seq=4096)", "at most 128 tokens"),
        ("bert(layers=0)", "auto", "1 to 96"),
        ("gpt2", "text(seq=4096)", "2 to 128 tokens"),
        ("lstm(size=big)", "auto", "tiny, paper"),
        ("transformer(task=poetry)", "auto", "translation, lm"),
        ("ugatit-light", "unpaired(image_size=16)", "32x32 or more"),
        ("mlp", "text", "fashion-mnist, shapes, synthetic"),
        ("lstm", "shapes", "needs lm"),
        ("mlp", "shaeps", "did you mean 'shapes'"),
        ("mlp | mlp", "auto", "is a chain"),
    ],
)
def test_mistakes_say_what_would_work(model: str, data: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(model, data)


def test_optimizers() -> None:
    parameters = list(torch.nn.Linear(2, 2).parameters())
    assert load_optimizer("sgd(lr=0.5, momentum=0.9)", parameters).defaults["lr"] == 0.5
    assert load_optimizer("adam(beta1=0.5)", parameters).defaults["betas"] == (0.5, 0.999)
    for name in ("adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "adadelta"):
        assert load_optimizer(name, parameters).param_groups[0]["params"] == parameters
    assert isinstance(load_optimizer("torch.optim:ASGD(lr=0.1)", parameters), torch.optim.ASGD)
    with pytest.raises(UsageError, match="did you mean 'adam'"):
        load_optimizer("adamm", parameters)
    with pytest.raises(UsageError, match="Invalid learning rate"):
        load_optimizer("sgd(lr=-1)", parameters)
    with pytest.raises(UsageError, match=r"sgd takes \(lr=0.01"):
        load_optimizer("sgd(rate=1)", parameters)
    with pytest.raises(UsageError, match="is a part of Python"):
        load_optimizer("builtins:list", parameters)
