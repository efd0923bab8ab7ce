"""The user's own model: a module, a whole workload, and every way to get it wrong."""

import sys
from pathlib import Path

import pytest
import torch

from syncline.errors import UsageError
from syncline.train.workload import build

_SOURCE = """
import torch
from torch import nn

from syncline.train.data import Need, load_data
from syncline.train.workload import Phase, Workload, build


def small(width=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, 10))


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.net(images), labels)


def whole():
    data = load_data("shapes(train=8, test=4)", Need("images"), model="whole", seed=0)
    phase = Phase("train", Loss(), "sgd(lr=0.1)")
    return Workload("whole", (phase,), data.train, data.test, data.samples, None)


def wrong():
    return [1, 2]


class Squares(torch.utils.data.Dataset):
    classes = 3

    def __init__(self, side=8):
        self.side = side

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.full((3, self.side, self.side), float(index)), index % 3


class Unknown(Squares):
    classes = None


class Bytes(Squares):
    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), 0


class Oblong(Squares):
    def __getitem__(self, index):
        return torch.zeros(3, 8, 9), 0


class Single(Squares):
    def __getitem__(self, index):
        return torch.zeros(3, 8, 8)


number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(_SOURCE)
    (tmp_path / "needs_more_for_test.py").write_text("import no_such_thing_for_test\n")
    # Found by being the current folder alone, as it is for an installed command.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine_for_test", None)


@pytest.mark.usefixtures("mine")
def test_a_module_is_a_classifier_of_images() -> None:
    workload = build("mine_for_test:small(width=3)", seed=5)
    assert workload.name == "mine_for_test:small(width=3)"
    assert workload.phases[0].module(*workload.train.batch(torch.arange(2))).isfinite()
    assert workload.evaluate is not None
    again = build("mine_for_test:small(width=3)", seed=5)
    pairs = zip(workload.phases[0].module.parameters(), again.phases[0].module.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.usefixtures("mine")
def test_a_workload_is_used_as_it_is() -> None:
    workload = build("mine_for_test:whole")
    assert (workload.name, len(workload.train)) == ("whole", 8)
    with pytest.raises(UsageError, match="a whole workload with its own data"):
        build("mine_for_test:whole", "shapes")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_module_for_test:net", "there is no module no_module_for_test"),
        ("needs_more_for_test:net", "it needs the module no_such_thing_for_test"),
        ("mine_for_test:net", "has no 'net' .*small"),
        ("mine_for_test:", "write package.module:factory"),
        ("mine_for_test:number", "is a int"),
        ("mine_for_test:wrong", "returned a list"),
        ("mine_for_test:small(depth=1)", r"small takes|takes \(width=2\)"),
    ],
)
def test_mistakes(model: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(model)


@pytest.mark.usefixtures("mine")
def test_a_torch_data_set_of_ones_own() -> None:
    workload = build("vgg11(width=0.03125)", "mine_for_test:Squares(side=32)")
    images, labels = workload.train.batch(torch.tensor([7, 5]))
    assert images[:, 0, 0, 0].tolist() == [7, 5]
    assert labels.tolist() == [1, 2]
    assert workload.phases[0].module.net(images).shape == (2, 3), "as many scores as classes"
    assert workload.phases[0].module(images, labels).isfinite()


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("mine_for_test:Loss", "is a class Loss without __len__ and __getitem__: name a class of a data set"),
        ("mine_for_test:wrong", "first sample is 1, not a pair"),
        ("mine_for_test:number", "is a int: a function or class is needed"),
        ("mine_for_test:Unknown", "give it an attribute `classes`"),
        ("mine_for_test:Bytes", "torch.uint8 and shape .3, 8, 8., not a float tensor"),
        ("mine_for_test:Oblong", "its images are 8x9"),
        ("mine_for_test:Single", "not a pair .image, label."),
        ("mine_for_test:Squares(width=3)", r"takes \(side=8\)"),
    ],
)
def test_mistakes_in_ones_own_data(data: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("mlp", data)


@pytest.mark.usefixtures("mine")
def test_own_images_are_not_text() -> None:
    with pytest.raises(UsageError, match="is a data set of images, and model 'lstm' needs lm"):
        build("lstm", "mine_for_test:Squares")
