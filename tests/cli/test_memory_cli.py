"""Commands and the memory that they need: refused before they start, or started without an estimate."""

from forked import call


def test_the_command_line_refuses_before_anything_starts(tmp_path):
    done = call("train", "--model", "resnet50", "--set", "cluster.memory=4GB", "--out", "run", cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("syncline: 'resnet50' on 4 ranks")
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3072, 10)

    def forward(self, x):
        return self.layer(x.flatten(1)) * float(x.sum().item() < 1e9)  # a meta tensor has no value
"""


def test_a_model_that_cannot_be_measured_still_trains(tmp_path):
    (tmp_path / "own_model.py").write_text(OWN)
    args = ("--model", "own_model:Net", "--nproc", "2", "--steps", "2", "--batch", "4")
    done = call("train", *args, "--set", "cluster.memory=1MB", "--set", "train.test_samples=0", cwd=tmp_path)
    assert done.code == 0, done.err
