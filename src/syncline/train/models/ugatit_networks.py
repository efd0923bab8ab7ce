"""U-GAT-IT's networks: a ResNet generator with attention and AdaLIN, and a discriminator with spectral norm."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm


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
