"""The built-in image data set: ten kinds of figures, drawn from random numbers of each sample.

Position, size, tilt, colours, a colour gradient and noise vary, so no single pixel reveals the class. Nothing is
stored: a batch is drawn when it is read, at any image size. Arithmetic is exact piecewise-linear float32
(no sine, no exponential), so that a sample is the same in a batch of 1 and in a batch of 256.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Batch, Data, Need, data
from syncline.train.data.counter import bits, uniform

_DRAWS = 20
_NOISE = 1 << 18

# Each takes coordinates in units of the figure's radius and gives a distance: negative is inside.
Figure = Callable[[Tensor, Tensor], Tensor]


def _disc(u: Tensor, v: Tensor) -> Tensor:
    return (u * u + v * v).sqrt() - 0.9


def _ring(u: Tensor, v: Tensor) -> Tensor:
    return ((u * u + v * v).sqrt() - 0.75).abs() - 0.22


def _square(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 0.8


def _frame(u: Tensor, v: Tensor) -> Tensor:
    return (torch.maximum(u.abs(), v.abs()) - 0.75).abs() - 0.2


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(v - 0.7, 0.87 * u.abs() - 0.5 * v - 0.45)


def _plus(u: Tensor, v: Tensor) -> Tensor:
    a, b = u.abs(), v.abs()
    return torch.maximum(torch.minimum(a, b) - 0.25, torch.maximum(a, b) - 1.0)


def _saltire(u: Tensor, v: Tensor) -> Tensor:
    return _plus(0.7071 * (u + v), 0.7071 * (u - v))


def _bars(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(_wave(v) - 0.25, _square(u, v) - 0.2)


def _pales(u: Tensor, v: Tensor) -> Tensor:
    return _bars(v, u)


def _checks(u: Tensor, v: Tensor) -> Tensor:
    product = (_wave(u) - 0.25) * (_wave(v) - 0.25)
    return torch.maximum(-8.0 * product, _square(u, v) - 0.2)


def _wave(x: Tensor) -> Tensor:
    """A triangle wave in [0, 0.5] of period 0.67."""
    phase = x * 1.5
    return (phase - phase.floor() - 0.5).abs()


FIGURES: tuple[Figure, ...] = (
    _disc, _ring, _square, _frame, _triangle, _plus, _saltire, _bars, _pales, _checks,
)  # fmt: skip
NAMES = ("disc", "ring", "square", "frame", "triangle", "plus", "saltire", "bars", "pales", "checks")


def coverage(labels: Tensor, draws: Tensor, *, size: int, outline: bool = False) -> Tensor:
    """How much of each pixel the figure covers, [n, size, size] in 0..1; `outline` draws the edge alone."""
    axis = (torch.arange(size, dtype=torch.float32, device="cpu") + 0.5) * (2.0 / size) - 1.0
    n = len(labels)
    radius = 0.4 + 0.35 * draws[:, 0]
    room = 1.0 - 0.9 * radius
    x = axis.view(1, 1, size) - ((2 * draws[:, 1] - 1) * room).view(n, 1, 1)
    y = axis.view(1, size, 1) - ((2 * draws[:, 2] - 1) * room).view(n, 1, 1)
    # A rotation by up to about 20 degrees, in the form without sine and cosine.
    t = 0.36 * draws[:, 3] - 0.18
    unit = (1 + t * t) * radius
    cos, sin = ((1 - t * t) / unit).view(n, 1, 1), (2 * t / unit).view(n, 1, 1)
    u, v = x * cos + y * sin, y * cos - x * sin
    distance = torch.empty(n, size, size, device="cpu")
    for label, figure in enumerate(FIGURES):
        rows = (labels == label).nonzero().squeeze(1)
        if len(rows):
            distance[rows] = figure(u[rows], v[rows])
    if outline:
        distance = (distance + 0.1).abs() - 0.1
    sharpness = (radius * (size / 2)).view(n, 1, 1)
    return (0.5 - distance * sharpness).clamp(0.0, 1.0)


@lru_cache(maxsize=4)
def _noise(seed: int, length: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    table = torch.rand(_NOISE + length, generator=generator, device="cpu") - 0.5
    return table.unfold(0, length, 1)


def grain(seed: int, stream: int, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Noise in -0.5..0.5 for each sample: a piece of one long fixed sequence, from a random place."""
    start = bits(seed, stream, indices, 1).squeeze(1) % _NOISE
    return _noise(seed, prod(shape))[start].view(len(indices), *shape)


@dataclass(frozen=True)
class Shapes:
    """Figures of ten classes; samples are (images [n, 3, size, size], labels [n])."""

    length: int
    size: int
    seed: int
    stream: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """Draw the samples at `indices`; they are the same in every epoch."""
        del epoch
        n = len(indices)
        labels = bits(self.seed, self.stream, indices, 1).squeeze(1) % len(FIGURES)
        draws = uniform(self.seed, self.stream + 1, indices, _DRAWS)
        cover = coverage(labels, draws, size=self.size).unsqueeze(1)
        back = (0.5 * draws[:, 4:7]).view(n, 3, 1, 1)
        fore = (0.4 + 0.6 * draws[:, 7:10]).view(n, 3, 1, 1)
        slope = (0.4 * draws[:, 10:13] - 0.2).view(n, 3, 1, 1)
        axis = torch.linspace(-1, 1, self.size, device="cpu").view(1, 1, 1, self.size)
        image = back + slope * axis + cover * (fore - back)
        image = image + 0.3 * grain(self.seed, self.stream + 2, indices, (3, self.size, self.size))
        return (image.clamp(0.0, 1.0) - 0.4) * 4.0, labels


@data("shapes", tasks=("images",))
def shapes(need: Need, *, seed: int, train: int = 50_000, test: int = 10_000, image_size: int | None = None) -> Data:
    """The generated default: `train` and `test` images, 32x32 unless the model or `image_size` says otherwise."""
    size = image_size or need.image_size or 32
    if min(train, test) < 1 or not 8 <= size <= 1024:
        raise UsageError(f"shapes({train=}, {test=}, image_size={size}): samples >= 1, image_size 8 to 1024")
    return Data(
        name="shapes",
        task="images",
        train=Shapes(train, size, seed, 0),
        test=Shapes(test, size, seed, 16),
        samples="images",
        classes=len(FIGURES),
        channels=3,
        image_size=size,
    )
