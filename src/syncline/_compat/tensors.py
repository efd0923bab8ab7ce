"""Torch internals of tensors: classes, storage, memory shared between processes, metadata."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NoSubclasses: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses are plain tensors; it holds for the thread that enters it."""


def subclasses_enabled() -> bool:
    """Whether this thread calls `__torch_function__` of tensor subclasses: it is not inside `NoSubclasses`."""
    return bool(torch._C._is_torch_function_enabled())


def share_reducer(kind: type[Tensor], before: Callable[[Tensor], None]) -> None:
    """Let `torch.multiprocessing` send tensors of this class by shared memory, as it sends plain ones.

    `before(tensor)` must restore the tensor's plain class.
    """
    from multiprocessing.reduction import ForkingPickler

    def reduce(tensor: Tensor) -> Any:
        before(tensor)
        return ForkingPickler._extra_reducers.get(type(tensor), lambda t: t.__reduce_ex__(2))(tensor)  # type: ignore[attr-defined]

    ForkingPickler.register(kind, reduce)


def storage_users(tensor: Tensor) -> int:
    """How many tensors and storage objects share a tensor's memory, the tensor itself included."""
    with NoSubclasses():
        storage = tensor.untyped_storage()
    # One of the users is the storage object made here.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_address(tensor: Tensor) -> int:
    """Which memory a tensor is in: equal for tensors that share it."""
    with NoSubclasses():
        return int(tensor.untyped_storage()._cdata)


def export_cuda_memory(tensor: Tensor) -> list[int | str | bool]:
    """A handle of a whole GPU allocation as plain values, for one other process; export once for each."""
    found = tensor.untyped_storage()._share_cuda_()
    return [value.hex() if isinstance(value, bytes) else value for value in found]


def open_cuda_memory(handle: Sequence[int | str | bool]) -> Tensor:
    """The bytes of another process's GPU memory, from its handle; they live as long as that process keeps them."""
    values = [bytes.fromhex(value) if isinstance(value, str) else value for value in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*values)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def unowned_view(tensor: Tensor) -> Tensor:
    """A view of a tensor that does not keep its memory: only for memory that stays, as that of CUDA graphs does."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first tensor of each pair from the second: on CUDA, in as few kernels as possible."""
    alike = [pair for pair in pairs if pair[0].stride() == pair[1].stride()]
    if alike:  # one pair that is not would make a kernel of each
        torch._foreach_copy_([into for into, _ in alike], [values for _, values in alike])
    if len(alike) < len(pairs):
        for into, values in pairs:
            if into.stride() != values.stride():
                into.copy_(values)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place; reads no values."""
    with NoSubclasses():
        return [tensor._version for tensor in tensors]


def raw_stream(index: int) -> int:
    """The handle of a CUDA device's current stream; `torch.cuda.current_stream` makes an object each time."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def forget_hooks(tensor: Any) -> None:
    """After `swap_tensors`: the lists of hooks stay with the Python object, but torch does not call them any more.

    Hooks that are registered from now on are called.
    """
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None


def swap_owner() -> Any:
    """The module that `swap_tensors` is looked up in."""
    return torch.utils


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a DTensor, without importing them."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "_local_tensor")


_GETTERS = """
shape dtype device layout ndim is_leaf is_sparse is_cuda is_cpu is_meta is_quantized is_mkldnn itemsize nbytes grad_fn
retains_grad requires_grad grad _version output_nr _backward_hooks _post_accumulate_grad_hooks is_mps is_sparse_csr
is_nested is_xpu
"""
_METHODS = """
size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex get_device
storage_offset is_same_size register_hook register_post_accumulate_grad_hook requires_grad_ __len__ __hash__ is_signed
is_inference
"""


def metadata_functions() -> frozenset[Any]:
    """The functions, as `__torch_function__` gets them, that read no values of a tensor."""
    functions: set[Any] = set()
    for name in _GETTERS.split():
        attribute = getattr(torch.Tensor, name, None)
        if hasattr(attribute, "__get__"):
            functions.add(attribute.__get__)  # type: ignore[union-attr]
    for name in ("grad", "requires_grad", "_backward_hooks"):
        functions |= {getattr(torch.Tensor, name).__set__, getattr(torch.Tensor, name).__delete__}
    functions |= {getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)}
    return frozenset(functions | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size})
