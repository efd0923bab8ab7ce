"""Image classifiers: a multi-layer perceptron, VGG and ResNet-50.

VGG-11 is a small one for 32x32 images, with BatchNorm; VGG-19 and ResNet-50 are the published ones for 224x224.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, classifier, scaled

_VGG11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
_VGG19 = (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0)
_RESNET50 = (3, 4, 6, 3)  # bottleneck blocks of each stage


@MODELS.register("mlp")
def mlp(*, hidden: int = 256, layers: int = 2) -> Blueprint:
    """A multi-layer perceptron: `layers` hidden layers of `hidden` units with ReLU, on any data set of images."""
    if hidden < 1 or not 0 <= layers <= 64:
        raise UsageError(f"mlp({hidden=}, {layers=}): hidden >= 1, layers 0 to 64")

    def net(data: Data) -> nn.Module:
        sizes = [data.channels * data.image_size**2] + [hidden] * layers
        parts: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            parts += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(sizes[-1], data.classes))

    return classifier(net, optimizer="sgd(lr=0.02, momentum=0.9)")


def _features(layout: tuple[int, ...], channels: int, *, width: float, norm: bool) -> nn.Sequential:
    """3x3 convolutions with ReLU; a 0 in the layout is a 2x2 max-pool."""
    parts: list[nn.Module] = []
    for out in layout:
        if out == 0:
            parts.append(nn.MaxPool2d(2))
            continue
        out = scaled(width, out)
        parts.append(nn.Conv2d(channels, out, 3, padding=1))
        parts += [nn.BatchNorm2d(out), nn.ReLU()] if norm else [nn.ReLU()]
        channels = out
    return nn.Sequential(*parts)


def _he_weights(modules: Iterable[nn.Module]) -> None:
    """Start the convolutions with weights that keep the size of signals through layers with ReLU."""
    for module in modules:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _vgg(features: nn.Module, head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=head))


@MODELS.register("vgg11")
def vgg11(*, width: float = 1.0, norm: bool = True) -> Blueprint:
    """VGG-11 for small images: 8 convolutions (64 to 512 channels) and one linear layer, 9.2 M parameters."""

    def net(data: Data) -> nn.Module:
        cells, rest = divmod(data.image_size, 32)
        if rest:
            raise UsageError(f"vgg11 needs images whose side is a multiple of 32, not {data.image_size}")
        features = _features(_VGG11, data.channels, width=width, norm=norm)
        if not norm:
            _he_weights(features)  # with torch's own, signals vanish in eight layers, and nothing is learnt
        return _vgg(features, nn.Linear(scaled(width, 512) * cells**2, data.classes))

    return classifier(net, optimizer="sgd(lr=0.01, momentum=0.9, weight_decay=0.0001)")


@MODELS.register("vgg19")
def vgg19(*, width: float = 1.0, dropout: float = 0.5) -> Blueprint:
    """VGG-19 as published: 16 convolutions and three linear layers, 143.7 M parameters with 1000 classes."""

    def net(data: Data) -> nn.Module:
        if data.image_size < 32:
            raise UsageError(f"vgg19 needs images of at least 32x32, not {data.image_size}")
        features = _features(_VGG19, data.channels, width=width, norm=False)
        features.append(nn.AdaptiveAvgPool2d(7))
        inner, hidden = scaled(width, 512) * 49, scaled(width, 4096)
        head = nn.Sequential(
            nn.Linear(inner, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, data.classes),
        )  # fmt: skip
        _he_weights(features)
        for layer in head:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0, 0.01)
                nn.init.zeros_(layer.bias)
        return _vgg(features, head)

    need = Need("images", image_size=224, classes=1000)
    return classifier(net, need=need, data="synthetic", optimizer="sgd(lr=0.01, momentum=0.9)")


class _Bottleneck(nn.Module):
    """A bottleneck block with the stride in the 3x3 convolution."""

    def __init__(self, inside: int, channels: int, *, stride: int) -> None:
        super().__init__()
        out = 4 * channels
        self.conv1 = nn.Conv2d(inside, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of bottleneck blocks, and a linear layer."""

    def __init__(self, *, channels: int, classes: int, width: float) -> None:
        super().__init__()
        inside = scaled(width, 64)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, inside, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        for stage, blocks in enumerate(_RESNET50):
            base = scaled(width, 64 << stage)
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(_Bottleneck(inside, base, stride=stride))
                inside = 4 * base
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Class scores; any image size."""
        logits: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits


@MODELS.register("resnet50")
def resnet50(*, width: float = 1.0) -> Blueprint:
    """ResNet-50 as published: 25.6 M parameters with 1000 classes; images of any size."""

    def net(data: Data) -> nn.Module:
        return ResNet(channels=data.channels, classes=data.classes, width=width)

    need = Need("images", image_size=224, classes=1000)
    optimizer = "sgd(lr=0.05, momentum=0.9, weight_decay=0.0001)"
    return classifier(net, need=need, data="synthetic", optimizer=optimizer)
