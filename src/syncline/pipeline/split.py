"""The split of a model into modules that run in turn: `Split`, the registry of adapters for foreign classes, `Part`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from syncline.registry import Registry

Values = tuple[Tensor, ...]


@dataclass(frozen=True)
class Split:
    """The modules of a model in the order of its forward pass; each is called with the values of the one before it.

    `blocks` has the sublayers of each block. The first `inputs` tensors of a batch enter the first module, the others
    are targets: `loss(output, *targets)` is the mean over the samples, `correct(output, *targets)` counts (right
    answers, answers).
    """

    before: Sequence[nn.Module]
    blocks: Sequence[Sequence[nn.Module]]
    after: Sequence[nn.Module]
    inputs: int = 1
    loss: Callable[..., Tensor] | None = None
    correct: Callable[..., tuple[Tensor, int]] | None = None


ADAPTERS: Registry[Callable[..., Split]] = Registry("pipeline adapter")
"""Functions from a model to its `Split`, by the name of the model's class."""


class Part(nn.Module):
    """A function that uses some modules and parameters of a model, as a module that has exactly these parameters."""

    def __init__(self, function: Callable[..., Tensor | Values], *used: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = function
        self.used = nn.ModuleList(module for module in used if isinstance(module, nn.Module))
        self.values = nn.ParameterList(value for value in used if isinstance(value, nn.Parameter))

    def forward(self, *values: Tensor) -> Tensor | Values:
        """The function's result."""
        return self._function(*values)
