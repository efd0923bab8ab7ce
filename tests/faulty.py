"""Models for `--model faulty:NAME`: they train, until a chosen rank misbehaves at a chosen step."""

import os
import signal
import time

import torch
from torch import nn


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


def not_a_module():
    return torch.zeros(1)
