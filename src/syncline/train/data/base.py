"""The data set interface: batches by index, the needs of a model, and the registry of data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from syncline.registry import Registry

Batch = tuple[Tensor, ...]


class Dataset(Protocol):
    """Random access to samples, in any order, as tensors on the CPU."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """The samples at `indices`; a sample depends on its index, the epoch and the data's seed alone.

        A data set whose samples are the same in every epoch may say so, `varies = False`: then activations of frozen
        blocks can be cached.
        """
        ...


@dataclass(frozen=True)
class Need:
    """What a model needs from its data. `None`: the model adapts to the data set.

    Tasks and their batches: `images` (images, labels); `unpaired` (images of one domain, of the other);
    `lm` (tokens, next tokens); `translation` (source, shifted target, target); `pretraining` (tokens, segments,
    masked targets, is-random-next); `text-classes` (tokens, segments, labels); `qa` (tokens, segments, start, end).
    """

    task: str
    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    vocabulary: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class Data:
    """A data set for one task, and the sizes that a model must adapt to."""

    train: Dataset
    test: Dataset | None
    samples: str = "images"
    classes: int = 0
    channels: int = 0
    image_size: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class Source:
    """A registered data set: the tasks it can serve, and `make(need, *, seed, **arguments) -> Data`."""

    tasks: tuple[str, ...]
    make: Callable[..., Data]

    def __call__(self, *args: Any, **kwargs: Any) -> Data:
        return self.make(*args, **kwargs)


DATA: Registry[Source] = Registry("data", label="data set", instance=Source)


def data(name: str, *, tasks: tuple[str, ...]) -> Callable[[Callable[..., Data]], Source]:
    """Decorator: register `make` as the data set `name`, which serves `tasks`."""

    def add(make: Callable[..., Data]) -> Source:
        return DATA.register(name)(Source(tasks, make))

    return add
