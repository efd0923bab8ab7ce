"""A tape like that of CUDA graphs, for the CPU: captures the operators of a function and runs them again."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorTape:
    """Captures operators on the CPU: running them again writes the same results into the same tensors."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        calls: list[Any] = []
        with Operators(calls):
            work()

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
