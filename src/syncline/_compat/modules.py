"""Torch internals of modules and data loaders: their tensors and hooks."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from syncline._compat.replace_function import replace_function


def own_tensors(module: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The module's own parameters and buffers, without a copy."""
    return module._parameters, module._buffers


def script_tensors(module: Any) -> Iterator[Tensor]:
    """All parameters and buffers of a TorchScript module in C++ (`ScriptMethod.owner`), its children's included."""
    tables: Any = torch._C
    for table in (tables.ParameterDict, tables.BufferDict):
        for _, tensor in table(module).items():
            yield tensor
    for _, child in tables.ModuleDict(module).items():
        yield from script_tensors(child)


def on_every_batch(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of the call that gets the next batch of any `torch.utils.data.DataLoader`."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return replace_function(_BaseDataLoaderIter, "__next__", around)


def on_every_forward(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call these around the forward of every module; returns a function that removes them."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def forward_pre_hooks(module: Any) -> "OrderedDict[int, Callable[..., Any]]":
    """The module's own forward pre-hooks."""
    return module._forward_pre_hooks  # type: ignore[no-any-return]


def module_tables(model: Any) -> list[dict[str, Any]]:
    """The dicts that hold the parameters and the children of every module; they change with the model."""
    tables = [table for module in model.modules() for table in (module._parameters, module._modules)]
    return [table for table in tables if isinstance(table, dict)]  # TorchScript modules have others, and do not change
