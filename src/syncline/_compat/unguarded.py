"""Functions of torch that read a tensor without asking its class."""

from typing import Any

import torch
import torch.distributed as dist


def unguarded_readers() -> list[tuple[Any, str]]:
    """Functions and methods that read a tensor without asking its `__torch_function__`: (owner, name)."""
    from torch._functorch import eager_transforms, predispatch

    found: list[tuple[Any, str]] = [
        *((torch, name) for name in ("tensor", "as_tensor", "asarray", "scalar_tensor", "to_dlpack")),
        *((torch, f"sparse_{kind}_tensor") for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
        (torch.utils.dlpack, "to_dlpack"),
        *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")),
        *((torch.Tensor, name) for name in ("new", "new_tensor")),
        *((eager_transforms, name) for name in ("_wrap_for_grad", "_wrap_functional_tensor")),
        (predispatch, "_add_batch_dim_impl"),
        (torch.autograd, "_engine_run_backward"),
        (torch.jit.ScriptFunction, "__call__"),
    ]
    if dist.is_available():
        from torch._C import _distributed_c10d as c10d

        for kind in (c10d.ProcessGroup, c10d.Backend):
            found += [(kind, name) for name in _COLLECTIVES.split() if name in vars(kind)]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


_COLLECTIVES = """
allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced
all_gather_single all_gather_single_coalesced alltoall alltoall_base all_to_all_single broadcast gather reduce
reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single
reduce_scatter_single_coalesced
scatter send recv recv_anysource
"""


def unguarded_by_class() -> list[tuple[Any, str]]:
    """The same, where the class of the tensor also decides about the result."""
    return [
        (torch.Tensor, "__new__"),
        (torch.nn.Parameter, "__new__"),
        (torch.nn.Buffer, "__new__"),
        *((torch.Tensor, name) for name in ("as_subclass", "_make_subclass", "set_")),
    ]
