"""Workloads: a model with its losses, and the data that it trains on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncline import spec
from syncline.errors import UsageError
from syncline.train.data import DATA, Batch, Dataset, Need, load_data
from syncline.train.models import MODELS, Blueprint, Classifier, Phase, load_optimizer
from syncline.train.models.base import one_phase

__all__ = ["DATA", "MODELS", "Phase", "Workload", "build", "load_optimizer"]


@dataclass(frozen=True)
class Workload:
    """The phases of every step in order, their data, and how to score a test batch.

    `evaluate(batch)` gives (number correct, number counted); it is `None` where there is no accuracy.
    """

    name: str
    phases: tuple[Phase, ...]
    train: Dataset
    test: Dataset | None
    samples: str
    evaluate: Callable[[Batch], tuple[float, int]] | None

    def to(self, device: torch.device | str) -> "Workload":
        """Move the phases' modules, in place; batches stay on the CPU until the loop moves them."""
        for phase in self.phases:
            phase.module.to(device)
        return self


def build(model: str, data: str = "auto", *, seed: int = 0) -> Workload:
    """The workload of two specs; the same on every rank for the same `seed`, which determines model and data.

    `model` is a registered name or the user's own `package.module:factory(args)`; `data` is a registered name or
    `auto`, the model's own default. The global random state is left as it was.
    """
    call = spec.parse_one(model)
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone: torch.manual_seed would also reseed every CUDA device.
        torch.default_generator.manual_seed(seed)
        made = spec.apply(call, MODELS.get(call.name, makes=(nn.Module, Blueprint, Workload)))
        if isinstance(made, Workload):
            if data != "auto":
                raise UsageError(f"model '{call}' is a whole workload with its own data: leave '{data}' out")
            return made
        blueprint = made if isinstance(made, Blueprint) else _classifier(made, call)
        source = load_data(blueprint.data if data == "auto" else data, blueprint.need, model=call.name, seed=seed)
        built = blueprint.build(source)
    score = built.score if source.test is not None else None
    return Workload(str(call), built.phases, source.train, source.test, source.samples, score)


def _classifier(made: Any, call: spec.Call) -> Blueprint:
    """The blueprint for a user's own module."""
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"model '{call}' returned a {type(made).__name__}: return a torch.nn.Module that gives class scores of"
            " images, or a syncline.train.workload.Workload"
        )

    built = one_phase(Classifier(made), optimizer="sgd(lr=0.01, momentum=0.9)")
    return Blueprint(Need("images", channels=3), "shapes", lambda _: built)
