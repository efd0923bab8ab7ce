"""U-GAT-IT (light): unpaired image translation with two generators and four discriminators, in two phases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, Built, Phase, choose
from syncline.train.models.ugatit_networks import Discriminator, Generator

_CYCLE, _IDENTITY, _CAM = 10.0, 10.0, 1000.0


@dataclass(frozen=True)
class _Size:
    width: int
    blocks: int
    depths: tuple[int, int]
    image_size: int


_SIZES = {"tiny": _Size(8, 1, (5, 3), 32), "paper": _Size(64, 4, (7, 5), 256)}


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
    """`paper`: 256x256 images, 64 channels; `tiny`: 32x32, 8 channels. Phases: discriminator, then generator."""
    chosen = choose("size", size, _SIZES)
    if width is not None:
        if not 1 <= width <= 256:
            raise UsageError(f"ugatit-light({width=}): 1 to 256 channels")
        chosen = _Size(width, chosen.blocks, chosen.depths, chosen.image_size)

    def build(data: Data) -> Built:
        if data.image_size % 4 or data.image_size < chosen.image_size:
            raise UsageError(
                f"ugatit-light(size={size}) needs images of {chosen.image_size}x{chosen.image_size} or more, in"
                f" multiples of 4, not {data.image_size}"
            )
        generators = tuple(Generator(width=chosen.width, blocks=chosen.blocks) for _ in range(2))
        pair = (generators[0], generators[1])
        judges = DiscriminatorPhase(pair, chosen)
        optimizer = "adam(lr=0.0001, beta1=0.5, beta2=0.999, weight_decay=0.0001)"
        phases = (
            Phase("discriminator", judges, optimizer),
            Phase("generator", GeneratorPhase(pair, judges), optimizer),
        )
        return Built(phases, None)

    return Blueprint(Need("unpaired", image_size=chosen.image_size, channels=3), "unpaired", build)
