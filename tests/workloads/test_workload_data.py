"""Generated data: the same in every process and batch, different by seed, learnable; errors that help."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from workload_cases import TINY, train

from syncline.errors import UsageError
from syncline.train.data import Need, load_data
from syncline.train.data.counter import bits, uniform
from syncline.train.data.images import StoredImages, checked_side, choose, class_range
from syncline.train.data.shapes import coverage
from syncline.train.workload import DATA, build, load_optimizer

GENERATED = [
    *TINY,
    ("mlp", "synthetic(image_size=16, classes=3)"),
    ("bert(head=qa)", "synthetic"),
    ("bert(head=classification)", "synthetic"),
    ("bert(head=pretraining)", "synthetic"),
    ("transformer", "synthetic"),
    ("lstm", "synthetic(seq=9)"),
    ("ugatit-light", "synthetic"),
]


def digest(model: str, data: str) -> str:
    """A checksum of some samples, in training and test, in two epochs."""
    workload = build(model, data, seed=11)
    total = hashlib.sha256()
    for part in (workload.train, workload.test):
        for epoch in (0, 1):
            for tensor in part.batch(torch.tensor([3, 0, 5]), epoch=epoch) if part else ():
                total.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return total.hexdigest()


def test_samples_are_the_same_in_another_process() -> None:
    cases = [GENERATED[0], GENERATED[6], GENERATED[7], GENERATED[8], GENERATED[11]]
    program = f"from test_workload_data import digest\nfor m, d in {cases!r}: print(digest(m, d))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert done.stdout.split() == [digest(model, data) for model, data in cases]


@pytest.mark.parametrize(("model", "data"), GENERATED)
def test_a_sample_depends_on_its_index_alone(model: str, data: str) -> None:
    samples = build(model, data).train
    together = samples.batch(torch.tensor([4, 1, 7, 2, 2]), epoch=1)
    alone = samples.batch(torch.tensor([7]), epoch=1)
    for many, one in zip(together, alone, strict=True):
        assert torch.equal(many[2:3], one)
        assert torch.equal(many[3], many[4])
        assert many.device.type == "cpu"


@pytest.mark.parametrize(("model", "data"), GENERATED[12:])
def test_synthetic_data_fits_every_task(model: str, data: str) -> None:
    workload = build(model, data)
    assert workload.test is None
    assert workload.evaluate is None
    assert all(loss == loss for loss in train(workload, steps=1)[0])


def test_the_seed_changes_the_samples() -> None:
    one, two = (build("mlp", seed=seed).train.batch(torch.arange(4)) for seed in (0, 1))
    assert not torch.equal(one[0], two[0])


def test_training_and_test_samples_differ() -> None:
    workload = build("mlp")
    assert (len(workload.train), len(workload.test or ())) == (50_000, 10_000)
    assert not torch.equal(workload.train.batch(torch.arange(4))[0], workload.test.batch(torch.arange(4))[0])


def test_shapes_are_balanced_and_scaled() -> None:
    images, labels = build("mlp").train.batch(torch.arange(2000))
    counts = labels.bincount(minlength=10)
    assert counts.min() > 150
    assert images.shape == (2000, 3, 32, 32)
    assert abs(float(images.mean())) < 0.5
    assert 0.5 < float(images.std()) < 1.5


def test_some_classes_are_the_same_images_with_labels_from_0() -> None:
    need = Need("images")
    some = load_data("shapes(classes='5-9', train=200)", need, model="vit", seed=0)
    _, labels = some.train.batch(torch.arange(200))
    assert (some.classes, sorted(set(labels.tolist()))) == (5, [0, 1, 2, 3, 4])
    plus = coverage(torch.full((1,), 5), torch.full((1, 20), 0.5), size=32)
    assert not torch.equal(plus, coverage(torch.zeros(1).long(), torch.full((1, 20), 0.5), size=32))
    stored = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1), torch.arange(10) % 5
    kept, renamed = choose(stored, class_range("2-3", 5), most=3)
    assert (kept.flatten().tolist(), renamed.tolist()) == ([2, 3, 7], [0, 1, 0])
    for text in ("5", "3-3", "4-2", "8-12", "a-b"):
        with pytest.raises(UsageError, match="first and last, such as classes='0-4' of 10"):
            load_data(f"shapes(classes='{text}')", need, model="vit", seed=0)
    with pytest.raises(UsageError, match="there are 4 training images"):
        choose(stored, range(2, 4), most=9)


def test_stored_images_are_enlarged_on_request() -> None:
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    images[0, 0, :, 2:] = 255
    labels = torch.tensor([0, 1])
    as_stored = StoredImages(images, labels, (0.0,), (1.0,)).batch(torch.arange(2))[0]
    large = StoredImages(images, labels, (0.0,), (1.0,), side=8).batch(torch.arange(2))[0]
    assert large.shape == (2, 1, 8, 8)
    assert torch.equal(large[1], torch.zeros(1, 8, 8))
    # The left half stays dark and the right half bright, with one soft step between them.
    assert torch.allclose(large[0, 0, 0], torch.tensor([0, 0, 0, 0.25, 0.75, 1, 1, 1]))
    assert torch.equal(as_stored[0, 0, 0], torch.tensor([0.0, 0, 1, 1]))
    assert (checked_side(None, stored=32), checked_side(32, stored=32), checked_side(224, stored=32)) == (0, 0, 224)
    for size in (31, 0, 5000):
        with pytest.raises(UsageError, match=f"image_size={size}: 32 \\(as stored\\) to 1024"):
            checked_side(size, stored=32)


@pytest.mark.full
def test_shapes_are_learnable() -> None:
    workload = build("vgg11(width=0.125)", seed=0)
    phase = workload.phases[0]
    optimizer = load_optimizer(phase.optimizer, phase.module.parameters())
    for step in range(120):
        optimizer.zero_grad()
        phase.module(*workload.train.batch(torch.arange(64) + 64 * step)).backward()
        optimizer.step()
    assert workload.evaluate is not None
    assert workload.test is not None
    right, count = workload.evaluate(workload.test.batch(torch.arange(500)))
    assert right / count > 0.5


def test_random_numbers_by_counter_look_uniform() -> None:
    draws = uniform(1, 2, torch.arange(5000), 4)
    assert 0 <= float(draws.min()) < 0.01
    assert 0.99 < float(draws.max()) < 1
    assert abs(float(draws.mean()) - 0.5) < 0.01
    assert abs(float(torch.corrcoef(draws.T)[0, 1])) < 0.05
    assert int(bits(-1, 0, torch.tensor([0, 2**40]), 2).min()) >= 0


def test_text_tasks_mean_what_they_say() -> None:
    tokens, _, start, end = build("bert(head=qa)", "text(megabytes=0.1)").train.batch(torch.arange(32))
    row = torch.arange(32)
    assert torch.equal(tokens[row, start], tokens[:, 1])
    assert torch.equal(tokens[row, end], tokens[:, 2])
    assert bool((end >= start).all())

    tokens, _, targets, swapped = build("bert(head=pretraining)", "text(megabytes=0.1)").train.batch(torch.arange(32))
    assert set((targets != -100).sum(1).tolist()) == {7}
    assert 4 < int(swapped.sum()) < 28
    assert bool((tokens == 4).any())

    source, shifted, target = build("transformer", "text(megabytes=0.1)").train.batch(torch.arange(32))
    assert torch.equal(shifted[:, 1:][target[:, :-1] > 3], target[:, :-1][target[:, :-1] > 3])
    assert torch.equal((source != 0).sum(1) + 1, (target != 0).sum(1))
    assert (source == 0).any()

    tokens, following = build("lstm", "text(megabytes=0.1)").train.batch(torch.arange(4))
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_masks_change_with_the_epoch_in_training_alone() -> None:
    workload = build("bert(head=pretraining)", "text(megabytes=0.1)")
    assert workload.test is not None
    for part, same in ((workload.train, False), (workload.test, True)):
        first, second = (part.batch(torch.arange(8), epoch=epoch)[2] for epoch in (0, 1))
        assert torch.equal(first, second) is same


def test_text_from_a_file_and_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{i % 7}" for i in range(1500)))
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2")
    assert len(build("lstm", f'text(path="{tmp_path / "one.txt"}", seq=8)').train) > 100
    workload = build("bert", f'text(path="{tmp_path}", classes=2)')
    assert set(workload.train.batch(torch.arange(len(workload.train)))[2].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("lstm", 'text(path="/no/such/file")', "there is no file or folder /no/such/file"),
        ("lstm", "text(tokens=letters)", "words or bytes"),
        ("lstm", "text(seq=4)", "8 to 65536"),
        ("lstm", "text(megabytes=0.00005)", "too few"),
        ("bert", "text(megabytes=0.01)", "the classes are top-level files or folders"),
        ("mlp", "shapes(train=0)", "samples >= 1"),
        ("mlp", "synthetic(pool=0)", "pool is 1"),
        ("ugatit-light", "unpaired(train=0)", "samples >= 1"),
        ("mlp", "shapes(colour=red)", "shapes takes"),
    ],
)
def test_mistakes_say_what_would_work(model: str, data: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(model, data)


def test_an_empty_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no readable text"):
        build("lstm", f'text(path="{tmp_path}")')


def test_registered_names() -> None:
    names = {"cifar10", "cifar100", "fashion-mnist", "shapes", "synthetic", "text", "unpaired"}
    assert names <= set(DATA.names())
