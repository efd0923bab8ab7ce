"""Stored images (uint8 tensors in memory): on request augmented and enlarged; choice of classes."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from syncline.errors import UsageError, short
from syncline.train.data.base import Batch
from syncline.train.data.counter import bits

_MARGIN = 4
_LARGEST = 1024


@dataclass(frozen=True)
class StoredImages:
    """Samples are (images [n, c, h, w], labels [n]); `augment` crops and flips by (seed, epoch, index).

    `side`: the height and width that images are enlarged to; 0: as they are stored.
    """

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augment: bool = False
    seed: int = 0
    side: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def varies(self) -> bool:
        """Whether samples differ between epochs."""
        return self.augment

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """The samples at `indices`, normalised."""
        images = self.images[indices].to(torch.float32) / 255.0
        mean, deviation = (torch.tensor(v, device="cpu").view(1, -1, 1, 1) for v in (self.mean, self.deviation))
        if self.augment:
            images = crop_and_flip(images, bits(self.seed, 64 + epoch, indices, 3))
        images = (images - mean) / deviation
        if self.side:
            images = F.interpolate(images, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return images, self.labels[indices]


def crop_and_flip(images: Tensor, draws: Tensor) -> Tensor:
    """The usual CIFAR augmentation: pad by 4, crop at a random position, mirror half of the images."""
    n, channels, height, width = images.shape
    padded = F.pad(images, (_MARGIN,) * 4)
    rows = (draws[:, 0] % (2 * _MARGIN + 1)).unsqueeze(1) + torch.arange(height, device="cpu")
    columns = (draws[:, 1] % (2 * _MARGIN + 1)).unsqueeze(1) + torch.arange(width, device="cpu")
    flipped = (draws[:, 2] % 2 == 1).unsqueeze(1)
    columns = torch.where(flipped, columns.flip(1), columns)
    sample = torch.arange(n, device="cpu").view(n, 1, 1, 1)
    channel = torch.arange(channels, device="cpu").view(1, channels, 1, 1)
    return padded[sample, channel, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]


def class_range(text: str | None, known: int) -> range:
    """The classes of `classes='5-9'`, first and last; all `known` ones for None.

    >>> class_range("5-9", 10), class_range(None, 4)
    (range(5, 10), range(0, 4))
    """
    if text is None:
        return range(known)
    match = re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*", text)
    found = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if len(found) < 2 or found[-1] >= known:
        raise UsageError(f"classes={short(text)}: first and last, such as classes='0-{known // 2 - 1}' of {known}")
    return found


def checked_side(image_size: int | None, *, stored: int) -> int:
    """The side that stored images of a smaller one are enlarged to; 0 for None and for their own size."""
    if image_size is None or image_size == stored:
        return 0
    if not stored < image_size <= _LARGEST:
        raise UsageError(f"image_size={image_size}: {stored} (as stored) to {_LARGEST}")
    return image_size


def choose(split: tuple[Tensor, Tensor], classes: range, *, most: int | None = None) -> tuple[Tensor, Tensor]:
    """The images of some classes, whose labels count from 0, at most the first `most` of them."""
    images, labels = split
    wanted = ((labels >= classes[0]) & (labels <= classes[-1])).nonzero().squeeze(1)[:most]
    if most is not None and len(wanted) < most:
        raise UsageError(f"train={most}: there are {len(wanted)} training images of these classes")
    return images[wanted], labels[wanted] - classes[0]
