"""Models for `--model resumable:NAME` that draw random numbers of every kind and keep buffers of their own."""

import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn

from syncline.train.strategies import Strategy, Synchroniser


class _Net(nn.Module):
    """Dropout (torch's numbers), a factor (Python's), BatchNorm (buffers that differ between ranks)."""

    def __init__(self, hidden):
        super().__init__()
        self.first, self.norm = nn.Linear(3 * 32 * 32, hidden), nn.BatchNorm1d(hidden)
        self.drop, self.second = nn.Dropout(0.3), nn.Linear(hidden, 10)

    def forward(self, images):
        if self.training:
            # From outside: the model is the same one, slow or fast.
            time.sleep(float(os.environ.get("SYNCLINE_TEST_SLEEP", 0)))
        hidden = self.drop(torch.relu(self.norm(self.first(images.flatten(1)))))
        return self.second(hidden) * (random.uniform(0.9, 1.1) if self.training else 1.0)


def net(hidden=24):
    return _Net(hidden)


class _ErrorFeedback(Synchroniser):
    """Sends BF16 and keeps what it cost; each rank owes something else."""

    def __init__(self, module, context):
        super().__init__(module, context)
        self.errors = {name: torch.zeros_like(p) for name, p in self.parameters}

    def synchronise(self):
        for name, gradient in self.gradients():
            owed = gradient + self.errors[name]
            sent = owed.bfloat16().float()
            self.errors[name] = owed - sent
            dist.all_reduce(sent, group=self.context.group)
            gradient.copy_(sent / self.context.workers)

    def state_dict(self):
        return {f"{name}.error": error for name, error in self.errors.items()}

    def load_state_dict(self, state):
        assert {f"{name}.error" for name in self.errors} == state.keys()
        self.errors = {name: state[f"{name}.error"].clone() for name in self.errors}


class ErrorFeedback(Strategy):
    """A strategy with state."""

    synchroniser = _ErrorFeedback
