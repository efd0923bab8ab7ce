"""Waits at a module's forward: for all its own parameters and buffers at once, before torch reads the first.

One wait of a module costs less than a touch of each tensor, and it covers code that cannot be seen later: C++
extensions, TorchScript, and torch's fast paths, which give up if a tensor has an unusual class. The hook is there only
while a tensor is marked. It reads the module's parameters when it is called: modules and parameters may be replaced.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from syncline._compat.modules import own_tensors
from syncline.engine.inflight import wait_on_touch

_READ_CHILDREN = (nn.MultiheadAttention, torch.jit.ScriptModule)
"""Modules whose forward reads their children's parameters without calling the children."""
_READ_CHILDREN_IN_EVAL = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    parameters, buffers = own_tensors(module)
    if parameters:
        wait_on_touch.touch_all(parameters.values())
    if buffers:
        wait_on_touch.touch_all(buffers.values())
    kind: Any = type(module)
    always, in_eval = _reads_children(kind)
    if always or (in_eval and not module.training):
        # In evaluation torch looks at the tensors' classes, and has another kernel for plain ones.
        wait = wait_on_touch.touch_all if module.training else wait_on_touch.settle_all
        wait(_all_tensors(module))


def _all_tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@lru_cache(maxsize=4096)
def _reads_children(kind: Any) -> tuple[bool, bool]:
    return issubclass(kind, _READ_CHILDREN), issubclass(kind, (*_READ_CHILDREN, *_READ_CHILDREN_IN_EVAL))


def wait_in_forwards() -> Callable[[], None]:
    """Make the forwards of all modules wait from now on; returns a function that ends this."""
    return register_module_forward_pre_hook(_before_forward).remove
