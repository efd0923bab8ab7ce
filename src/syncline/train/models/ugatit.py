"""U-GAT-IT (light): unpaired image translation with two generators and four discriminators, in two phases.

The generator is a ResNet with attention and AdaLIN, the discriminator has spectral norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, Built, Phase, choose

_CYCLE, _IDENTITY, _CAM = 10.0, 10.0, 1000.0


@dataclass(frozen=True)
class _Size:
    width: int
    blocks: int
    depths: tuple[int, int]
    image_size: int


_SIZES = {"tiny": _Size(8, 1, (5, 3), 32), "paper": _Size(64, 4, (7, 5), 256)}


def _conv(inside: int, outside: int, kernel: int, *, stride: int = 1, pad: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.ReflectionPad2d(pad), nn.Conv2d(inside, outside, kernel, stride=stride, bias=False))


def _mixed(x: Tensor, rho: Tensor) -> Tensor:
    """Instance and layer normalisation of `x`, mixed by `rho` (per channel, 0..1)."""
    # The published code clips rho after each step. Used clipped, with the gradient passed through, it needs no
    # hook after the optimizer and cannot get stuck outside the range.
    rho = rho + (rho.clamp(0, 1) - rho).detach()
    spread, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
    instance = (x - mean) * (spread + 1e-5).rsqrt()
    spread, mean = torch.var_mean(x, dim=(1, 2, 3), keepdim=True)
    layer = (x - mean) * (spread + 1e-5).rsqrt()
    return rho * instance + (1 - rho) * layer


class AdaLIN(nn.Module):
    """Adaptive layer-instance normalisation: scale and shift come from the attention features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.full((1, channels, 1, 1), 0.9))

    def forward(self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        """Normalise and modulate."""
        return _mixed(x, self.rho) * gamma[:, :, None, None] + beta[:, :, None, None]


class LIN(nn.Module):
    """Layer-instance normalisation with its own scale and shift."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and modulate."""
        return _mixed(x, self.rho) * self.gamma + self.beta


class _ResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            _conv(channels, channels, 3), nn.InstanceNorm2d(channels), nn.ReLU(),
            _conv(channels, channels, 3), nn.InstanceNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.block(x)
        return out


class _AdaptiveBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(channels, channels, 3), AdaLIN(channels)
        self.conv2, self.norm2 = _conv(channels, channels, 3), AdaLIN(channels)

    def forward(self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x), gamma, beta))
        out: Tensor = x + self.norm2(self.conv2(y), gamma, beta)
        return out


def _attention(x: Tensor, average: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Class activation maps: `x` weighted both ways, [n, 2c, h, w], and the two logits of the domain classifier."""
    logits = torch.cat((F.linear(x.mean((2, 3)), average), F.linear(x.amax((2, 3)), maximum)), dim=1)
    maps = torch.cat((x * average[:, :, None, None], x * maximum[:, :, None, None]), dim=1)
    return maps, logits


class Generator(nn.Module):
    """An image in, the translated image and the attention's logits out (the light version)."""

    def __init__(self, *, width: int, blocks: int) -> None:
        super().__init__()
        down: list[nn.Module] = [_conv(3, width, 7, pad=3), nn.InstanceNorm2d(width), nn.ReLU()]
        for channels in (width, 2 * width):
            down += [_conv(channels, 2 * channels, 3, stride=2), nn.InstanceNorm2d(2 * channels), nn.ReLU()]
        channels = 4 * width
        self.down = nn.Sequential(*down, *(_ResBlock(channels) for _ in range(blocks)))
        self.average = nn.Linear(channels, 1, bias=False)
        self.maximum = nn.Linear(channels, 1, bias=False)
        self.mix = nn.Conv2d(2 * channels, channels, 1)
        self.style = nn.Sequential(
            nn.Linear(channels, channels, bias=False), nn.ReLU(),
            nn.Linear(channels, channels, bias=False), nn.ReLU(),
        )  # fmt: skip
        self.gamma = nn.Linear(channels, channels, bias=False)
        self.beta = nn.Linear(channels, channels, bias=False)
        self.adaptive = nn.ModuleList(_AdaptiveBlock(channels) for _ in range(blocks))
        up: list[nn.Module] = []
        for channels in (4 * width, 2 * width):
            half = channels // 2
            up += [nn.Upsample(scale_factor=2), _conv(channels, half, 3), LIN(half), nn.ReLU()]
        self.up = nn.Sequential(*up, _conv(width, 3, 7, pad=3), nn.Tanh())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(translated image, domain logits)."""
        maps, logits = _attention(self.down(image), self.average.weight, self.maximum.weight)
        x = F.relu(self.mix(maps))
        style = self.style(x.mean((2, 3)))
        gamma, beta = self.gamma(style), self.beta(style)
        for block in self.adaptive:
            x = block(x, gamma, beta)
        return self.up(x), logits


class Discriminator(nn.Module):
    """Real or translated, judged on patches; `depth` convolutions (7: global, 5: local)."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inside, outside = 3, width
        for layer in range(depth - 1):
            stride = 1 if layer == depth - 2 else 2
            conv = spectral_norm(nn.Conv2d(inside, outside, 4, stride=stride))
            parts += [nn.ReflectionPad2d(1), conv, nn.LeakyReLU(0.2)]
            inside, outside = outside, 2 * outside
        self.down = nn.Sequential(*parts)
        self.average = spectral_norm(nn.Linear(inside, 1, bias=False))
        self.maximum = spectral_norm(nn.Linear(inside, 1, bias=False))
        self.mix = nn.Conv2d(2 * inside, inside, 1)
        self.pad = nn.ReflectionPad2d(1)
        self.judge = spectral_norm(nn.Conv2d(inside, 1, 4, bias=False))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(patch logits, domain logits)."""
        # Each read of a spectral-normalised weight runs a power iteration: read each one once.
        average, maximum = self.average.weight, self.maximum.weight
        assert isinstance(average, Tensor)
        assert isinstance(maximum, Tensor)
        maps, logits = _attention(self.down(image), average, maximum)
        x = F.leaky_relu(self.mix(maps), 0.2)
        return self.judge(self.pad(x)), logits


class DiscriminatorPhase(nn.Module):
    """Updates the discriminators: two (global and local) for each domain; the generators are constants."""

    def __init__(self, generators: tuple[Generator, Generator], size: _Size) -> None:
        super().__init__()
        self.a, self.b = (
            nn.ModuleList(Discriminator(width=size.width, depth=depth) for depth in size.depths) for _ in range(2)
        )
        # A tuple keeps them out of this module's parameters: they belong to the other phase.
        self._generators = generators

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Least-squares loss of telling real from translated, on patches and on attention logits."""
        with torch.no_grad():
            to_b, to_a = (generator(image)[0] for generator, image in zip(self._generators, (a, b), strict=True))
        loss = a.new_zeros(())
        for judges, real, fake in ((self.a, a, to_a), (self.b, b, to_b)):
            for judge in judges:
                loss = loss + sum(_far(logits, 1.0) for logits in judge(real))
                loss = loss + sum(_far(logits, 0.0) for logits in judge(fake))
        return loss


class GeneratorPhase(nn.Module):
    """Updates the generators; the discriminators are constants."""

    def __init__(self, generators: tuple[Generator, Generator], judges: DiscriminatorPhase) -> None:
        super().__init__()
        self.to_b, self.to_a = generators
        self._judges = (judges,)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Adversarial, cycle, identity and attention losses of both directions."""
        judges = self._judges[0]
        there = self._direction(a, self.to_b, self.to_a, judges.b)
        back = self._direction(b, self.to_a, self.to_b, judges.a)
        return there + back

    def _direction(self, image: Tensor, to: Generator, back: Generator, judges: nn.Module) -> Tensor:
        translated, translated_cam = to(image)
        restored, _ = back(translated)
        same, same_cam = back(image)
        loss: Tensor = _CYCLE * F.l1_loss(restored, image) + _IDENTITY * F.l1_loss(same, image)
        # The generator's attention must tell an image to translate from one that is of its domain already.
        loss = loss + _CAM * (_binary(translated_cam, 1.0) + _binary(same_cam, 0.0))
        for judge in cast("Sequence[nn.Module]", judges):
            loss = loss + sum(_far(logits, 1.0) for logits in _constant(judge, translated))
        return loss


def _constant(module: nn.Module, *inputs: Tensor) -> Any:
    """`module(*inputs)` without a gradient for its parameters.

    Their `.grad` and the hooks that synchronise them belong to the other phase, and must not notice this one.
    """
    return functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, inputs)


def _far(logits: Tensor, target: float) -> Tensor:
    return (logits - target).square().mean()


def _binary(logits: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


@MODELS.register("ugatit-light")
def ugatit_light(*, size: str = "tiny", width: int | None = None) -> Blueprint:
    """A GAN that translates images. `paper`: 256x256, 64 channels; `tiny`: 32x32, 8. Discriminator, then generator."""
    chosen = choose("size", size, _SIZES)
    if width is not None:
        if not 1 <= width <= 256:
            raise UsageError(f"ugatit-light({width=}): 1 to 256 channels")
        chosen = replace(chosen, width=width)

    def build(data: Data) -> Built:
        if data.image_size % 4 or data.image_size < chosen.image_size:
            raise UsageError(
                f"ugatit-light(size={size}) needs images of {chosen.image_size}x{chosen.image_size} or more, in"
                f" multiples of 4, not {data.image_size}"
            )
        to_b, to_a = (Generator(width=chosen.width, blocks=chosen.blocks) for _ in range(2))
        judges = DiscriminatorPhase((to_b, to_a), chosen)
        generators = GeneratorPhase((to_b, to_a), judges)
        optimizer = "adam(lr=0.0001, beta1=0.5, beta2=0.999, weight_decay=0.0001)"
        return Built((Phase("discriminator", judges, optimizer), Phase("generator", generators, optimizer)), None)

    return Blueprint(Need("unpaired", image_size=chosen.image_size, channels=3), "unpaired", build)
