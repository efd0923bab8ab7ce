"""Random tensors of the right shape, made once, for timing only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Batch, Data, Need, data

TASKS = ("images", "unpaired", "lm", "translation", "pretraining", "text-classes", "qa")


@dataclass(frozen=True)
class Synthetic:
    """A pool of random samples, made at the first batch and then reused."""

    need: Need
    length: int
    pool: int
    seed: int
    varies: ClassVar[bool] = False

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """Sample `i` is number `i % pool` of the pool, in every epoch."""
        return tuple(part[indices % self.pool] for part in self._samples)

    @cached_property
    def _samples(self) -> Batch:
        return _random(self.need, self.pool, self.seed)


def _random(need: Need, count: int, seed: int) -> Batch:
    generator = torch.Generator("cpu").manual_seed(seed)
    length, classes, side = need.sequence, need.classes or 0, need.image_size or 0

    def images() -> Tensor:
        return torch.randn((count, need.channels or 0, side, side), generator=generator, device="cpu")

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (count, *shape), generator=generator, device="cpu")

    def tokens() -> Tensor:
        # From 5 up: below are the special tokens (padding would be left out of the attention).
        return 5 + integers(need.vocabulary - 5, length)

    def segments() -> Tensor:
        return (torch.arange(length, device="cpu") >= length // 2).long().repeat(count, 1)

    def pretraining() -> Batch:
        masked = torch.rand((count, length), generator=generator, device="cpu") < 0.15
        masked[:, 0] = True
        return tokens(), segments(), tokens().masked_fill(~masked, -100), integers(2)

    batches: dict[str, Callable[[], Batch]] = {
        "images": lambda: (images(), integers(classes)),
        "unpaired": lambda: (images().tanh(), images().tanh()),
        "lm": lambda: (tokens(), tokens()),
        "translation": lambda: (tokens(), tokens(), tokens()),
        "pretraining": pretraining,
        "text-classes": lambda: (tokens(), segments(), integers(classes)),
        "qa": lambda: (tokens(), segments(), integers(length), integers(length)),
    }
    return batches[need.task]()


@data("synthetic", tasks=TASKS)
def synthetic(
    need: Need, *, seed: int, samples: int = 50_000, pool: int = 64, image_size: int | None = None,
    channels: int | None = None, classes: int | None = None, seq: int | None = None,
) -> Data:  # fmt: skip
    """Random samples in the sizes that the model prefers, or those given; no test set."""
    side, depth = image_size or need.image_size or 32, channels or need.channels or 3
    kinds, length = classes or need.classes or 10, seq or need.sequence
    images = need.task in ("images", "unpaired")
    if min(samples, side, depth, kinds, 1 if images else length) < 1 or not 1 <= pool <= 65_536:
        raise UsageError("synthetic: samples, image_size, channels, classes and seq are 1 or more, pool is 1 to 65536")
    sized = replace(need, image_size=side, channels=depth, classes=kinds, sequence=length)
    return Data(
        Synthetic(sized, samples, pool, seed),
        None,
        samples="images" if images else "sequences",
        classes=kinds,
        channels=depth,
        image_size=side,
        sequence=length,
    )
