"""VGG: the course's VGG-11 for 32x32 images, with BatchNorm, and the published VGG-19 for 224x224."""

from collections import OrderedDict

from torch import nn

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, classifier, scaled

_VGG11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
_VGG19 = (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0)


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


def _vgg(features: nn.Module, head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=head))


@MODELS.register("vgg11")
def vgg11(*, width: float = 1.0, norm: bool = True) -> Blueprint:
    """The course's network: 8 convolutions (64 to 512 channels) and one linear layer."""

    def net(data: Data) -> nn.Module:
        cells, rest = divmod(data.image_size, 32)
        if rest:
            raise UsageError(f"vgg11 needs images whose side is a multiple of 32, not {data.image_size}")
        features = _features(_VGG11, data.channels, width=width, norm=norm)
        return _vgg(features, nn.Linear(scaled(width, 512) * cells**2, data.classes))

    return classifier(net, optimizer="sgd(lr=0.01, momentum=0.9, weight_decay=0.0001)")


@MODELS.register("vgg19")
def vgg19(*, width: float = 1.0, dropout: float = 0.5) -> Blueprint:
    """The published network: 16 convolutions and three linear layers, 143.7 M parameters with 1000 classes."""

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
        for module in [*features, *head]:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        return _vgg(features, head)

    need = Need("images", image_size=224, classes=1000)
    return classifier(net, need=need, data="synthetic", optimizer="sgd(lr=0.01, momentum=0.9)")
