"""Models for `--model faulty:NAME`: they train, until a chosen rank misbehaves at a chosen step."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from syncline.pipeline import rank_stages
from syncline.pipeline.reshape import Offer
from syncline.train.models.vit import vit


class _Faulty(nn.Module):
    def __init__(self, fault, rank, step):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
        self.fault, self.rank, self.step, self.calls = fault, rank, step, 0

    def forward(self, images):
        self.calls += 1
        if self.training and self.calls == self.step and int(os.environ.get("RANK", 0)) == self.rank:
            self.fault()
        return self.net(images)


def _raise():
    raise ArithmeticError("the model broke on purpose")


def raising(rank=1, step=3):
    return _Faulty(_raise, rank, step)


def killed(rank=1, step=3):
    return _Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL), rank, step)


def stuck(rank=1, step=3):
    return _Faulty(lambda: time.sleep(3600), rank, step)


def slow(seconds=0.2):
    class Slow(_Faulty):
        def forward(self, images):
            time.sleep(seconds)
            return self.net(images)

    return Slow(None, -1, -1)


def reshaped(layers=5):
    """A vision transformer for runs in which every reshape pays, however short their steps are."""
    Offer.pays = property(lambda offer: True)
    return vit(size="tiny", layers=layers)


class _Doubling(nn.Module):
    """Doubles what passes, from the second training step on: a buffer says so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        out = x * self.factor.item()
        if self.training:
            self.factor.fill_(2.0)
        return out


def with_buffer():
    """A sequence with a buffer that matters, and a weight that two of its blocks share."""
    blocks = [nn.Linear(16, 16) for _ in range(4)]
    blocks[3].weight = blocks[0].weight
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), _Doubling(), *blocks, _Doubling(), nn.Linear(16, 10)
    )


def killed_in_a_reshape(rank=1):
    """The same model. The first run in a folder loses a rank when values move; the file `fired` says so."""
    fired, move = Path("fired"), rank_stages.move_state

    def dies(*args, **kwargs):
        if not fired.exists():
            fired.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return move(*args, **kwargs)

    if int(os.environ.get("RANK", 0)) == rank:
        rank_stages.move_state = dies
    return reshaped(layers=4)


def not_a_module():
    return torch.zeros(1)
