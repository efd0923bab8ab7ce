"""ResNet-50: bottleneck blocks with the stride in the 3x3 convolution."""

from torch import Tensor, nn
from torch.nn import functional as F

from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, classifier, scaled

_BLOCKS = (3, 4, 6, 3)


class _Bottleneck(nn.Module):
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
        for stage, blocks in enumerate(_BLOCKS):
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
    """The published network: 25.6 M parameters with 1000 classes; images of any size."""

    def net(data: Data) -> nn.Module:
        return ResNet(channels=data.channels, classes=data.classes, width=width)

    need = Need("images", image_size=224, classes=1000)
    optimizer = "sgd(lr=0.05, momentum=0.9, weight_decay=0.0001)"
    return classifier(net, need=need, data="synthetic", optimizer=optimizer)
