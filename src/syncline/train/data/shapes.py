"""The built-in image data sets `shapes` and `unpaired`: ten kinds of figures, drawn from random numbers.

Position, size, tilt, colours, a colour gradient and noise vary, so no single pixel reveals the class. Nothing is
stored: a batch is drawn when it is read, at any image size. Arithmetic is exact piecewise-linear float32
(no sine, no exponential), so that a sample is the same in a batch of 1 and in a batch of 256.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Batch, Data, Need, data
from syncline.train.data.counter import bits, uniform
from syncline.train.data.images import class_range

_DRAWS = 20
_NOISE = 1 << 18

# Each takes coordinates in units of the figure's radius and gives a distance: negative is inside.
Figure = Callable[[Tensor, Tensor], Tensor]


def _radius(u: Tensor, v: Tensor) -> Tensor:
    return (u * u + v * v).sqrt()


def _side(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs())


def _plus(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(u.abs(), v.abs()) - 0.25, _side(u, v) - 1.0)


def _stripes(x: Tensor) -> Tensor:
    """A triangle wave in [-0.25, 0.25] of period 0.67."""
    phase = x * 1.5
    return (phase - phase.floor() - 0.5).abs() - 0.25


FIGURES: dict[str, Figure] = {
    "disc": lambda u, v: _radius(u, v) - 0.9,
    "ring": lambda u, v: (_radius(u, v) - 0.75).abs() - 0.22,
    "square": lambda u, v: _side(u, v) - 0.8,
    "frame": lambda u, v: (_side(u, v) - 0.75).abs() - 0.2,
    "triangle": lambda u, v: torch.maximum(v - 0.7, 0.87 * u.abs() - 0.5 * v - 0.45),
    "plus": _plus,
    "saltire": lambda u, v: _plus(0.7071 * (u + v), 0.7071 * (u - v)),
    "bars": lambda u, v: torch.maximum(_stripes(v), _side(u, v) - 0.8 - 0.2),
    "pales": lambda u, v: torch.maximum(_stripes(u), _side(u, v) - 0.8 - 0.2),
    "checks": lambda u, v: torch.maximum(-8.0 * (_stripes(u) * _stripes(v)), _side(u, v) - 0.8 - 0.2),
}


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
    for label, figure in enumerate(FIGURES.values()):
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


@dataclass(frozen=True)
class Shapes:
    """Figures of ten classes; samples are (images [n, 3, size, size], labels [n]), the same in every epoch."""

    length: int
    size: int
    seed: int
    stream: int
    kinds: range = range(len(FIGURES))
    varies: ClassVar[bool] = False

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """Draw the samples at `indices`."""
        labels, draws, cover = self._figures(indices, self.stream)
        slope = _colour(0.4 * draws[:, 10:13] - 0.2)
        axis = torch.linspace(-1, 1, self.size, device="cpu").view(1, 1, 1, self.size)
        back, fore = _colour(0.5 * draws[:, 4:7]), _colour(0.4 + 0.6 * draws[:, 7:10])
        image = self._grained(back + slope * axis + cover * (fore - back), 0.3, indices, self.stream)
        return (image - 0.4) * 4.0, labels

    def _figures(self, indices: Tensor, stream: int, *, outline: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(labels, random numbers, coverage) of the samples."""
        labels = bits(self.seed, stream, indices, 1).squeeze(1) % len(self.kinds)
        draws = uniform(self.seed, stream + 1, indices, _DRAWS)
        drawn = coverage(labels + self.kinds[0], draws, size=self.size, outline=outline)
        return labels, draws, drawn.unsqueeze(1)

    def _grained(self, image: Tensor, strength: float, indices: Tensor, stream: int) -> Tensor:
        """The image in 0..1, with noise for each sample: a piece of one long fixed sequence, from a random place."""
        start = bits(self.seed, stream + 2, indices, 1).squeeze(1) % _NOISE
        noise = _noise(self.seed, 3 * self.size**2)[start].view(len(indices), 3, self.size, self.size)
        return (image + strength * noise).clamp(0.0, 1.0)


class Unpaired(Shapes):
    """Two domains: samples are (painted, drawn), each [n, 3, size, size] in -1..1, of different figures."""

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """Draw both domains' samples at `indices`."""
        _, draws, cover = self._figures(indices, self.stream)
        back, fore = _colour(0.5 * draws[:, 4:7]), _colour(0.4 + 0.6 * draws[:, 7:10])
        painted = self._grained(back + cover * (fore - back), 0.1, indices, self.stream)
        _, draws, cover = self._figures(indices, self.stream + 8, outline=True)
        paper, ink = torch.tensor(0.9, device="cpu"), _colour(0.3 * draws[:, 4:5])
        drawn = self._grained(paper + cover * (ink - paper), 0.1, indices, self.stream + 8)
        return painted * 2.0 - 1.0, drawn * 2.0 - 1.0


def _colour(values: Tensor) -> Tensor:
    return values.view(*values.shape, 1, 1)


def _size(need: Need, image_size: int | None, samples: int) -> int:
    size = image_size or need.image_size or 32
    if samples < 1 or not 8 <= size <= 1024:
        raise UsageError(f"{samples} samples of image_size={size}: samples >= 1, image_size 8 to 1024 are possible")
    return size


@data("shapes", tasks=("images",))
def shapes(
    need: Need, *, seed: int, train: int = 50_000, test: int = 10_000, image_size: int | None = None,
    classes: str | None = None,
) -> Data:  # fmt: skip
    """Generated images of ten shapes, the default: `train` and `test` of them, 32x32 or as the model needs them.

    `classes='5-9'` takes some of the ten classes.
    """
    size, kinds = _size(need, image_size, min(train, test)), class_range(classes, len(FIGURES))
    splits = Shapes(train, size, seed, 0, kinds), Shapes(test, size, seed, 16, kinds)
    return Data(*splits, classes=len(kinds), channels=3, image_size=size)


@data("unpaired", tasks=("unpaired",))
def unpaired(need: Need, *, seed: int, train: int = 5_000, image_size: int | None = None) -> Data:
    """Generated filled and outlined figures for a GAN, `train` of each, at the model's image size; no test set."""
    size = _size(need, image_size, train)
    return Data(Unpaired(train, size, seed, 32), None, channels=3, image_size=size)
