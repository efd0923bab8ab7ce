"""A text of the values in any result, so that two results can be compared bit by bit."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch


def digest(value: Any) -> str:
    """A text that differs where values differ."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return digest(list(value.detach().unbind()))
        if value.layout != torch.strided:
            return digest(value.detach().to_dense())
        return repr(value.detach().flatten().tolist())
    if isinstance(value, Mapping):
        return digest(list(value.values()))
    if isinstance(value, list | tuple | torch.Size) or inspect.isgenerator(value):
        return f"[{', '.join(map(digest, value))}]"
    if type(value).__name__ == "PyCapsule":
        return digest(torch.utils.dlpack.from_dlpack(value))
    if type(value).__name__ == "ndarray":
        return repr(value.tolist())
    if hasattr(value, "nbytes") and hasattr(value, "tolist"):  # a storage
        return repr(value.tolist())
    return repr(value) if isinstance(value, int | float | complex | str | bytes | bool) else type(value).__name__
