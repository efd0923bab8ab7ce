"""Parameter lists of well-known models, without building them."""

from collections.abc import Sequence

import torch

from syncline.plan import Shape


def layer(name: str, shape: Sequence[int], *, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[Shape]:
    weight = Shape(f"{name}.weight", tuple(shape), dtype)
    return [weight, Shape(f"{name}.bias", (shape[0],), dtype)] if bias else [weight]


def mlp(dtype: torch.dtype = torch.float32) -> list[Shape]:
    widths = [784, 1024, 1024, 10]
    return [s for i in range(3) for s in layer(f"{2 * i}", (widths[i + 1], widths[i]), dtype=dtype)]


def vgg19() -> list[Shape]:
    """VGG19 without BatchNorm: 38 tensors, 143.7 M values."""
    shapes, before, at = [], 3, 0
    for width in [64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0]:
        if width:
            shapes += layer(f"features.{at}", (width, before, 3, 3))
        before, at = width or before, at + (2 if width else 1)
    for at, (inner, outer) in zip((0, 3, 6), ((25088, 4096), (4096, 4096), (4096, 1000)), strict=True):
        shapes += layer(f"classifier.{at}", (outer, inner))
    return shapes


def resnet50() -> list[Shape]:
    """ResNet50: 161 tensors, 25.6 M values; convolutions without bias, BatchNorms between them."""
    shapes = [*layer("conv1", (64, 3, 7, 7), bias=False), *layer("bn1", (64,))]
    before = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            here = f"layer{stage}.{block}"
            for i, shape in enumerate(((width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)), start=1):
                shapes += [*layer(f"{here}.conv{i}", shape, bias=False), *layer(f"{here}.bn{i}", shape[:1])]
            if block == 0:
                shapes += layer(f"{here}.downsample.0", (4 * width, before, 1, 1), bias=False)
                shapes += layer(f"{here}.downsample.1", (4 * width,))
            before = 4 * width
    return [*shapes, *layer("fc", (1000, 2048))]
