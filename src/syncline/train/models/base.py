"""The model interface: a blueprint that names its needs and builds phases with one loss each; the registry."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.pipeline.blocks import Split, known_split
from syncline.registry import Registry
from syncline.train.data.base import Batch, Data, Need

T = TypeVar("T")
Score = Callable[[Batch], tuple[float, int]]


@dataclass(frozen=True)
class Phase:
    """One loss, backward, synchronisation and optimizer step of a training step.

    `module(*batch)` is the scalar loss; its parameters are exactly what this phase updates, its buffers exactly
    what this phase keeps. `optimizer` is the default optimizer as a spec.
    """

    name: str
    module: nn.Module
    optimizer: str


@dataclass(frozen=True)
class Built:
    """A built model: the phases in order, and how to score a test batch (`None`: no accuracy)."""

    phases: tuple[Phase, ...]
    score: Score | None


@dataclass(frozen=True)
class Blueprint:
    """A model before its data is known: its needs, its default data, and how to build it."""

    need: Need
    data: str
    build: Callable[[Data], Built]


# Factories: the spec's arguments -> Blueprint.
MODELS: Registry[Callable[..., Blueprint]] = Registry("model")


class Task(nn.Module):
    """A module whose forward returns the loss of a batch, and which can count right answers."""

    def correct(self, *batch: Any, **_: Any) -> tuple[Tensor, int]:
        """The number of right answers in a batch, and the number of answers."""
        raise NotImplementedError


class Classifier(Task):
    """A network of images under cross-entropy: batches are (images, labels)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the batch."""
        return F.cross_entropy(self.net(images), labels)

    def correct(self, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Images whose highest score is their label's."""
        return right_class(self.net(images), labels)

    def split(self) -> Split:
        """The sublayers of the network, if it is one of repeated blocks."""
        inner = known_split(self.net)
        if inner is None:
            raise UsageError(f"{type(self.net).__name__} has no repeated blocks: it can neither freeze nor be cut")
        return replace(inner, loss=F.cross_entropy, correct=right_class)


def one_phase(task: Task, *, optimizer: str) -> Built:
    """A model with one phase, called `train`, scored by the task's `correct`."""
    return Built((Phase("train", task, optimizer),), lambda batch: score(task, batch))


def classifier(
    net: Callable[[Data], nn.Module], *, need: Need | None = None, data: str = "shapes", optimizer: str
) -> Blueprint:
    """The blueprint of an image classifier: `net(data)` makes the network for the data's sizes."""
    return Blueprint(need or Need("images"), data, lambda made: one_phase(Classifier(net(made)), optimizer=optimizer))


def score(task: Task, batch: Batch) -> tuple[float, int]:
    """(right answers, answers) in evaluation mode; the modules' modes are left as they were."""
    modes = [(module, module.training) for module in task.modules()]
    task.eval()
    try:
        with torch.no_grad():
            device = next(task.parameters()).device
            right, count = task.correct(*(part.to(device) for part in batch))
    finally:
        for module, mode in modes:
            module.training = mode
    return float(right), count


def right_class(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Samples whose highest score is their label's, and all samples."""
    return (scores.argmax(1) == labels).sum(), len(labels)


def token_accuracy(logits: Tensor, targets: Tensor, *, ignore: int) -> tuple[Tensor, int]:
    """Right answers and answers among the positions whose target is not `ignore`."""
    asked = targets != ignore
    return ((logits.argmax(-1) == targets) & asked).sum(), int(asked.sum())


def scaled(width: float, channels: int) -> int:
    """`channels` times the width factor, at least one."""
    if not 0 < width <= 16:
        raise UsageError(f"width={width}: a factor above 0 and up to 16 (1 is the published network)")
    return max(1, round(width * channels))


def choose(kind: str, name: str, sizes: dict[str, T]) -> T:
    """The entry of a table of sizes or heads, or a `UsageError` with its names."""
    if name not in sizes:
        raise UsageError(f"{kind}={name} is not known: choose one of {', '.join(sizes)}")
    return sizes[name]
