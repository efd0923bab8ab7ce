"""Tensors in flight: whatever touches one waits for it first, wherever the touch comes from.

While a parameter's update (a gradient's exchange, a buffer's broadcast) is under way, its Python object has another
class whose `__torch_function__` waits. So a module's forward, a parent's, a tied head, a functional call, EMA code,
`state_dict`, `deepcopy` and a user's own line all wait, and nothing else pays. Only what reads no value (shape, dtype,
`grad`, `requires_grad`) passes. Two doors remain and are guarded elsewhere: other tensors that share the memory
(`shares_memory`, asked before an update is left in flight) and code that torch compiled (`compiled.py`).
"""

import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syncline._compat import NoSubclasses, storage_users


class Ticket(Protocol):
    """What a touch waits for."""

    marked: list[Tensor] | None
    """The tensors whose touches wait for it; None before the first."""

    def wait(self) -> None:
        """Return when the value may be used (on CUDA: by what the current stream does next); raise if it never will."""

    def done(self) -> bool:
        """Whether nobody needs to wait any more, on any stream."""


_tickets: dict[int, tuple[Tensor, Ticket]] = {}
_lock = threading.RLock()
"""Another thread may read parameters (an average of them, a checkpoint) while this one steps."""
_Plain = torch.Tensor
_REDUCE = torch.Tensor.__reduce_ex__
"""Copies and pickles by the class that a tensor has, which must be its own then."""


def mark(tensor: Tensor, ticket: Ticket) -> bool:
    """Let every touch of `tensor` wait for `ticket`. False if its class allows no such thing: wait at once then."""
    with _lock:
        kind = type(tensor)
        pending = kind if getattr(kind, "_syncline_pending", False) else _pending_class(kind)
        if pending is None:
            return False
        # In this order: whoever sees the class finds the ticket.
        _tickets[id(tensor)] = (tensor, ticket)
        if pending is not kind:
            tensor.__class__ = pending
        if ticket.marked is None:
            ticket.marked = []
        ticket.marked.append(tensor)
    return True


def is_pending(tensor: Tensor) -> bool:
    """Whether a touch would wait."""
    return id(tensor) in _tickets


def release(tensor: Tensor, ticket: Ticket | None = None) -> None:
    """Give the tensor its own class back, without waiting; with a `ticket`, only if it is the one waited for."""
    with _lock:
        entry = _tickets.get(id(tensor))
        if entry is None or (ticket is not None and entry[1] is not ticket):
            return
        kind = type(tensor)
        if getattr(kind, "_syncline_pending", False):
            tensor.__class__ = kind.__mro__[1]
        del _tickets[id(tensor)]


def touch(tensor: Tensor) -> None:
    """Wait for a tensor; it keeps its waiting class until nobody needs to wait, on any stream.

    With it, all that wait for the same: a touch of each would cost more than to let them go.
    """
    entry = _tickets.get(id(tensor))
    if entry is None:
        return
    ticket = entry[1]
    ticket.wait()
    if ticket.done():
        with _lock:
            marked, ticket.marked = ticket.marked or (), None
            for other in (tensor, *marked):
                release(other, ticket)


def shares_memory(tensor: Tensor, own: int) -> bool:
    """Whether tensors that we do not know of (a `state_dict` kept from before, `p.data`) share the memory.

    `own` is how many known tensors use it. Such a tensor cannot wait, so its owner must.
    """
    return storage_users(tensor) > own


def _find(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if id(value) in _tickets and isinstance(value, _Plain):
            found.append(value)
        elif kind is list or kind is tuple or isinstance(value, list | tuple):
            _find(value, found)
        elif kind is dict:
            _find(value.values(), found)


def _touched(
    cls: type, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if func in _METADATA:
        with NoSubclasses():
            return func(*args, **kwargs)
    found: list[Tensor] = []
    _find(args, found)
    if kwargs:
        _find(kwargs.values(), found)
    waited = [(tensor, _tickets.get(id(tensor))) for tensor in found]
    marked = not found
    for tensor in found:
        touch(tensor)
        marked = marked or id(tensor) in _tickets
    if marked:
        if func is not _REDUCE and all(getattr(kind, "_syncline_pending", False) for kind in types):
            # Still marked, for other streams: this stream has its wait.
            with NoSubclasses():
                return func(*args, **kwargs)
        for tensor, entry in waited:
            if entry is not None:
                release(tensor, entry[1])
    return func(*args, **kwargs)


@lru_cache(maxsize=256)
def _pending_class(kind: type) -> type | None:
    """A subclass of `kind` that waits; None for tensor subclasses that already have a `__torch_function__`."""
    own = kind.__torch_function__  # type: ignore[attr-defined]
    plain = (torch.Tensor.__torch_function__, nn.Parameter.__torch_function__)
    if own not in plain and getattr(own, "__func__", own) not in [getattr(p, "__func__", p) for p in plain]:
        return None

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        entry = None
        while (now := _tickets.get(id(self))) is not None and (entry is None or now[1] is not entry[1]):
            entry = now  # a step of another thread may have come meanwhile
            touch(self)
        if now is None:
            copied: Tensor = kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]
            return copied
        with NoSubclasses():  # still marked, for other streams
            # A tensor of another class than its own is copied by what `new_empty` gives, which is none of that class.
            alias = kind is torch.Tensor and self.is_leaf
            source = self.detach().requires_grad_(self.requires_grad) if alias else self
            copied = memo[id(self)] = kind.__deepcopy__(source, memo)  # type: ignore[attr-defined]
        copied.__class__ = kind
        return copied

    body = {
        "__torch_function__": classmethod(_touched),
        "__deepcopy__": deepcopy,
        "_syncline_pending": True,
        "__module__": kind.__module__,
    }
    try:
        pending: type = type(kind)(kind.__name__, (kind,), body)
        probe = torch.empty(0) if kind is torch.Tensor else None
        if probe is not None:
            probe.__class__ = pending
    except TypeError:
        return None
    return pending


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


def _metadata() -> frozenset[Any]:
    functions: set[Any] = set()
    for name in _GETTERS.split():
        attribute = getattr(torch.Tensor, name, None)
        if hasattr(attribute, "__get__"):
            functions.add(attribute.__get__)  # type: ignore[union-attr]
    for name in ("grad", "requires_grad", "_backward_hooks"):
        functions |= {getattr(torch.Tensor, name).__set__, getattr(torch.Tensor, name).__delete__}
    functions |= {getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)}
    return frozenset(functions | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size})


_METADATA = _metadata()
