"""Vision transformer: patches, pre-norm sublayers, a class token. B/16 as published, smaller ones for 32x32."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need
from syncline.train.models.attention import AttentionSublayer, FeedForwardSublayer
from syncline.train.models.base import MODELS, Blueprint, choose, classifier


@dataclass(frozen=True)
class _Size:
    width: int
    layers: int
    heads: int
    patch: int
    image_size: int
    classes: int | None
    data: str


_SIZES = {
    "tiny": _Size(64, 4, 4, 4, 32, None, "shapes"),
    "small": _Size(192, 8, 6, 4, 32, None, "shapes"),
    "b16": _Size(768, 12, 12, 16, 224, 1000, "synthetic"),
}


class _Embedding(nn.Module):
    def __init__(self, size: _Size, data: Data) -> None:
        super().__init__()
        count = (data.image_size // size.patch) ** 2
        self.patches = nn.Conv2d(data.channels, size.width, size.patch, stride=size.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(torch.empty(1, count + 1, size.width))
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.patches.weight, std=(data.channels * size.patch**2) ** -0.5)
        assert self.patches.bias is not None
        nn.init.zeros_(self.patches.bias)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        out: Tensor = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.positions
        return out


class _Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


@MODELS.register("vit")
def vit(*, size: str = "tiny", layers: int | None = None, patch: int | None = None) -> Blueprint:
    """A vision transformer. `tiny` and `small`: 32x32 images, patches of 4; `b16`: ViT-B/16 (86.6 M parameters).

    The network is a plain sequence of units: embedding, attention and MLP sublayers in turn, norm, head.
    """
    chosen = choose("size", size, _SIZES)
    chosen = chosen if patch is None else replace(chosen, patch=patch)
    depth = chosen.layers if layers is None else layers
    if not 1 <= depth <= 96 or not 1 <= chosen.patch <= 64:
        raise UsageError(f"vit({layers=}, {patch=}): 1 to 96 layers, patches of 1 to 64")

    def net(data: Data) -> nn.Module:
        if data.image_size % chosen.patch:
            raise UsageError(
                f"vit(size={size}) needs images whose side is a multiple of {chosen.patch}, not {data.image_size}"
            )
        units = nn.Sequential()
        units.add_module("embedding", _Embedding(chosen, data))
        for layer in range(depth):
            units.add_module(f"attention{layer}", AttentionSublayer(chosen.width, chosen.heads))
            mlp = FeedForwardSublayer(chosen.width, 4 * chosen.width, activation=nn.GELU())
            units.add_module(f"mlp{layer}", mlp)
        units.add_module("norm", nn.LayerNorm(chosen.width, eps=1e-6))
        head = _Head(chosen.width, data.classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        units.add_module("head", head)
        return units

    need = Need("images", image_size=chosen.image_size, classes=chosen.classes)
    return classifier(net, need=need, data=chosen.data, optimizer="adamw(lr=0.001, weight_decay=0.05)")
