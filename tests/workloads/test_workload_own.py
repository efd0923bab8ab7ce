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
