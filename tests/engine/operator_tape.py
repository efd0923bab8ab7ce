"""A tape like that of CUDA graphs, for the CPU: captures the operators of a function and runs them again.

As with CUDA graphs that share their memory, what a capture leaves in memory that it allocated is lost when another one
runs: `overwrite` does that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorTape:
    """Captures operators on the CPU: running them again writes the same results into the same tensors."""

    def __init__(self) -> None:
        self.captures = 0
        self.allocated: list[Tensor] = []
        """What captures have allocated."""

    def overwrite(self) -> None:
        """Do what captures of another launch may do to the memory of this one."""
        for tensor in self.allocated:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        calls: list[Any] = []
        with Operators(calls):
            work()
        for _, args, kwargs, made in calls:
            given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            self.allocated += [
                t for t in made if isinstance(t, Tensor) and not t._is_view() and t.data_ptr() not in given
            ]

        def replay() -> None:
            for function, args, kwargs, made in calls:
                again = tree_leaves(function(*args, **kwargs))
                for old, new in zip(made, again, strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor


class Operators(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, tree_leaves(out)))
        return out
