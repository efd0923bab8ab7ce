"""Torch internals of FSDP2."""

import sys
from collections.abc import Callable
from typing import Any

from syncline._compat.replace_function import replace_function


def on_fsdp_messages(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of the calls in which FSDP2, if it is loaded, packs, sends, awaits and unpacks messages."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    owner = getattr(module, "FSDPParamGroup", None)
    calls = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward")
    undo = [replace_function(owner, call, around) for call in calls if hasattr(owner, call)]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def is_fsdp_managed(module: Any) -> bool:
    """Whether FSDP (1 or 2) shards the parameters of this module."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def fsdp_requires_all_reduce(module: Any) -> bool:
    """Whether `set_requires_all_reduce(False)` is not in force on this FSDP2 module."""
    return all(group.all_reduce_grads for group in _fsdp_groups(module))


def fsdp_divide_factor(module: Any) -> float | None:
    """The factor of `set_gradient_divide_factor` on this FSDP2 module, if it was called."""
    return next((group.gradient_divide_factor for group in _fsdp_groups(module)), None)


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.13
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
