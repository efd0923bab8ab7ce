"""The content of a rank's part of a checkpoint, made without training."""

from dataclasses import asdict

import torch

from syncline.train.checkpoint.content import FORMAT
from syncline.train.checkpoint.history import History
from syncline.train.checkpoint.randomness import random_state
from syncline.train.config import Train

CPU = torch.device("cpu")


def content(step, **extra):
    """A rank's part without parameters and optimizers."""
    series = torch.zeros(min(step, 1000), dtype=torch.float64)
    history = {**vars(History()), "losses": series, "step_ms": series}
    empty = {key: [] for key in ("buffers", "synchronisers", "parameters", "optimizers")}
    settings = {"strategy": "mine", "train": asdict(Train()), "steps": 5}
    who = {"format": FORMAT, "step": step, "rank": 0, "workers": 1}
    return {
        **who,
        **settings,
        "history": history,
        "random": random_state(CPU),
        **empty,
        "x": torch.arange(1000),
        **extra,
    }
