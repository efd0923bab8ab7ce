"""A multi-layer perceptron on flattened images: the smallest thing that trains."""

from itertools import pairwise

from torch import nn

from syncline.errors import UsageError
from syncline.train.data.base import Data
from syncline.train.models.base import MODELS, Blueprint, classifier


@MODELS.register("mlp")
def mlp(*, hidden: int = 256, layers: int = 2) -> Blueprint:
    """`layers` hidden layers of `hidden` units with ReLU, on any data set of images."""
    if hidden < 1 or not 0 <= layers <= 64:
        raise UsageError(f"mlp({hidden=}, {layers=}): hidden >= 1, layers 0 to 64")

    def net(data: Data) -> nn.Module:
        sizes = [data.channels * data.image_size**2] + [hidden] * layers
        parts: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            parts += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(sizes[-1], data.classes))

    return classifier(net, optimizer="sgd(lr=0.02, momentum=0.9)")
