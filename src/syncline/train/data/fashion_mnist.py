"""Fashion-MNIST from IDX files (Debian's package `dataset-fashion-mnist`, or any folder), and the IDX reader."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need, data
from syncline.train.data.images import StoredImages, checked_side, choose, class_range

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_CLASSES = 10
_SIDE = 32
# Of the padded 32x32 training images.
_MEAN, _DEVIATION = 0.2190, 0.3318
_UNSIGNED_BYTE = 0x08
# Several times the largest set in this format; a gzip of zeros must not fill the memory.
_MAX_BYTES = 1 << 30


@data("fashion-mnist", tasks=("images",))
def fashion_mnist(
    need: Need, *, seed: int, root: str | None = None, channels: int | None = None, augment: bool = False,
    classes: str | None = None, train: int | None = None, image_size: int | None = None,
) -> Data:  # fmt: skip
    """28x28 grey images, padded to 32x32; one channel, or three equal ones where the model needs them.

    `classes='5-9'` takes some of the classes, `train` so many of the training images; `image_size=224` enlarges them.
    """
    folder = Path(root).expanduser() if root else DEBIAN
    count = channels or need.channels or 1
    if count not in (1, 3):
        raise UsageError(f"fashion-mnist(channels={count}): 1 or 3")
    kinds = class_range(classes, _CLASSES)
    training, test = (_split(folder, name, count) for name in ("train", "t10k"))
    mean, deviation = (_MEAN,) * count, (_DEVIATION,) * count
    side = checked_side(image_size, stored=_SIDE)
    return Data(
        train=StoredImages(*choose(training, kinds, most=train), mean, deviation, augment, seed, side),
        test=StoredImages(*choose(test, kinds), mean, deviation, side=side),
        classes=len(kinds),
        channels=count,
        image_size=side or _SIDE,
    )


def _split(folder: Path, name: str, channels: int) -> tuple[Tensor, Tensor]:
    images = read_idx(_find(folder, f"{name}-images-idx3-ubyte"), dimensions=3)
    labels = read_idx(_find(folder, f"{name}-labels-idx1-ubyte"), dimensions=1)
    if images.shape != (len(labels), 28, 28) or int(labels.max()) >= _CLASSES:
        raise UsageError(
            f"{folder}: {name} has images of shape {tuple(images.shape)} and {len(labels)} labels up to"
            f" {int(labels.max())}; 28x28 images and as many labels below {_CLASSES} are expected"
        )
    padded = F.pad(images, (2, 2, 2, 2)).unsqueeze(1)
    return padded.repeat(1, channels, 1, 1), labels.long()


def _find(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise UsageError(
        f"fashion-mnist: there is no {folder / name}[.gz]: install Debian's package dataset-fashion-mnist, or put"
        " the four IDX files of github.com/zalandoresearch/fashion-mnist in a folder and give root=FOLDER"
    )


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The uint8 tensor of an IDX file with that many dimensions; anything else is a `UsageError`."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            head = file.read(4 + 4 * dimensions)
            if len(head) != 4 + 4 * dimensions or head[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
                raise UsageError(f"{path} is not an IDX file of bytes with {dimensions} dimensions: fetch it again")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            if min(shape) < 1 or prod(shape) > _MAX_BYTES:
                raise UsageError(f"{path} announces the shape {shape}: 1 byte to {_MAX_BYTES >> 30} GiB is expected")
            # One byte more than announced shows a file that is too long.
            body = file.read(prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}; fetch it again") from error
    if len(body) != prod(shape):
        more = "more" if len(body) > prod(shape) else f"only {len(body)}"
        raise UsageError(f"{path} is damaged: its header says {prod(shape)} bytes, it has {more}; fetch it again")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)
