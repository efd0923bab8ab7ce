"""Tensors in flight: whatever touches a marked tensor waits for its ticket first.

While a parameter's update (a gradient's exchange, a buffer's broadcast) is in flight, its Python object has another
class, whose `__torch_function__` waits. So a parent's forward, a tied head, a functional call, EMA code, `state_dict`,
`deepcopy` and the user's own code all wait, and nothing else has any cost. Only what reads no value (shape, dtype,
`grad`, `requires_grad`) passes. Handled elsewhere: the forward of the module that owns the tensor (`module_waits.py`,
which is cheaper), functions without `__torch_function__` (`unguarded.py`), compiled code (`compiled_code.py`), and
other tensors that share the memory (`shares_memory`, asked before an update is left in flight).
"""

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from syncline._compat.tensors import NoSubclasses, metadata_functions, share_reducer, storage_users, subclasses_enabled
from syncline.engine.protocols import Ticket

_tickets: dict[int, tuple[Tensor, Ticket]] = {}
"""The marked tensors by id. Written with `_lock` held, read without."""
_lock = threading.RLock()
"""Other threads may read parameters (for an average, for a checkpoint) while the training thread steps."""
_REDUCE = torch.Tensor.__reduce_ex__
"""Copies and pickles by the tensor's class, which must be the original one then."""
_METADATA = metadata_functions()
_waiting_classes: set[type] = set()


_while_marked: list[Callable[[], Callable[[], None]]] = []
_undo: list[Callable[[], None]] = []


def while_marked(begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Call `begin` whenever the first tensor is marked, and the function it returns when none is marked any more.

    Both are called with the lock held. Returns a function that ends this.
    """
    with _lock:
        _while_marked.append(begin)
        if _undo:
            _undo.append(begin())
    return lambda: _while_marked.remove(begin)


def mark(tensor: Tensor, ticket: Ticket) -> bool:
    """Make every touch of `tensor` wait for `ticket`. False if its class does not allow that: wait at once then.

    From the training thread; takes the lock.
    """
    return not mark_all((tensor,), ticket)


def mark_all(tensors: Iterable[Tensor], ticket: Ticket) -> list[Tensor]:
    """Mark tensors with one ticket; returns those whose class does not allow that."""
    refused = []
    with _lock:
        marked = ticket.marked
        if marked is None:
            marked = ticket.marked = []
        for tensor in tensors:
            kind = type(tensor)
            waiting = kind if kind in _waiting_classes else _waiting_class(kind)
            if waiting is None:
                refused.append(tensor)
                continue
            # In this order: a thread that sees the class finds the ticket.
            _tickets[id(tensor)] = (tensor, ticket)
            if waiting is not kind:
                tensor.__class__ = waiting
            marked.append(tensor)
        if _tickets and not _undo:
            _undo.extend(begin() for begin in _while_marked)
    return refused


def is_marked(tensor: Tensor) -> bool:
    """Whether a touch would wait."""
    return id(tensor) in _tickets


def is_waiting_class(kind: type) -> bool:
    """Whether this is the class of a marked tensor."""
    return "syncline_waits" in vars(kind)


def any_marked() -> bool:
    """Whether a touch of any tensor would wait."""
    return bool(_tickets)


def release(tensor: Tensor, ticket: Ticket | None = None) -> None:
    """Restore the tensor's class without waiting; with a `ticket`, only if it is marked with that one.

    From any thread; takes the lock.
    """
    release_all((tensor,), ticket)


def release_all(tensors: Iterable[Tensor | None], ticket: Ticket | None = None) -> None:
    """Restore the classes of those that are marked (with this ticket, if one is given)."""
    with _lock:
        for tensor in tensors:
            entry = _tickets.get(id(tensor))
            if entry is None or (ticket is not None and entry[1] is not ticket):
                continue
            del _tickets[id(tensor)]
            kind = type(tensor)
            if kind in _waiting_classes:
                entry[0].__class__ = kind.__mro__[1]
        if not _tickets:
            while _undo:
                _undo.pop()()


def touch(tensor: Tensor) -> None:
    """Wait for a tensor. When nobody needs to wait any more, on any stream, its class is restored.

    So are those of all other tensors with the same ticket: that is cheaper than a touch of each. From any thread;
    waits without the lock.
    """
    entry = _tickets.get(id(tensor))
    if entry is None:
        return
    ticket = entry[1]
    ticket.wait()
    if ticket.done():
        with _lock:
            marked, ticket.marked = ticket.marked or (), None
            release_all((tensor, *marked), ticket)


def touch_all(tensors: Iterable[Tensor | None]) -> None:
    """Wait for those that are marked."""
    for tensor in tensors:
        if tensor is not None and id(tensor) in _tickets:
            touch(tensor)


def settle_all(tensors: Iterable[Tensor | None]) -> None:
    """Wait for those that are marked, and restore their classes: what follows looks at the class of a tensor."""
    for tensor in tensors:
        entry = None if tensor is None else _tickets.get(id(tensor))
        if tensor is None or entry is None:
            continue
        touch(tensor)
        if is_marked(tensor) and tensor.device.type == "cuda":
            # Its stream waits; other streams must too, before the mark may go.
            torch.cuda.current_stream(tensor.device).synchronize()
            touch(tensor)
        release(tensor, entry[1])


def release_done() -> None:
    """Restore the tensors that nobody needs to wait for any more, without a touch of them. From any thread."""
    with _lock:
        for tensor, ticket in list(_tickets.values()):
            if ticket.done():
                release(tensor, ticket)


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """A model that was dropped with its last update in flight is garbage: the table above must not hold it."""
    if phase == "start" and info["generation"] == 2 and _tickets:
        release_done()


gc.callbacks.append(_before_collection)


def find_marked(*values: Any) -> list[Tensor]:
    """The marked tensors among these values, which may be lists, tuples and dicts of them.

    None in the engine's own threads, which may use them.
    """
    found: list[Tensor] = []
    if _tickets and subclasses_enabled():
        _find(values, found)
    return found


def touch_everything() -> None:
    """Wait for all that is marked, as far as it can arrive: without an error if an engine has failed."""
    for tensor, _ in list(_tickets.values()):
        with suppress(Exception):
            touch(tensor)


def forget_tickets(lost: Ticket) -> None:
    """Give every marked tensor this ticket instead: nothing that was in flight will arrive.

    For a forked child: the lock may have been held by a thread that does not exist there.
    """
    global _lock
    _lock = threading.RLock()
    for key, (tensor, _) in list(_tickets.items()):
        _tickets[key] = (tensor, lost)


def shares_memory(tensor: Tensor, own: int) -> bool:
    """Whether tensors that we do not know (a `state_dict` kept from before, `p.data`) share the tensor's memory.

    `own` is the number of known users. Reads of an unknown tensor cannot wait, so the step must.
    """
    return storage_users(tensor) > own


def _find(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if id(value) in _tickets and isinstance(value, torch.Tensor):
            found.append(value)
        elif kind is list or kind is tuple or isinstance(value, list | tuple):
            _find(value, found)
        elif kind is dict:
            _find(value.values(), found)


def _wait_then_call(
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
        if func is not _REDUCE and all(kind in _waiting_classes for kind in types):
            # Still marked for other streams; this stream waits already.
            with NoSubclasses():
                return func(*args, **kwargs)
        for tensor, entry in waited:
            if entry is not None:
                release(tensor, entry[1])
    return func(*args, **kwargs)


@lru_cache(maxsize=256)
def _waiting_class(kind: type) -> type | None:
    """A subclass of `kind` that waits; None for tensor subclasses with their own `__torch_function__`."""
    own = kind.__torch_function__  # type: ignore[attr-defined]
    plain = (torch.Tensor.__torch_function__, nn.Parameter.__torch_function__)
    if own not in plain and getattr(own, "__func__", own) not in [getattr(p, "__func__", p) for p in plain]:
        return None

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        entry = None
        while (now := _tickets.get(id(self))) is not None and (entry is None or now[1] is not entry[1]):
            entry = now  # another thread may have stepped meanwhile
            touch(self)
        if now is None:
            copied: Tensor = kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]
            return copied
        with NoSubclasses():  # still marked for other streams
            # deepcopy of a tensor subclass uses `new_empty`, which returns a plain tensor.
            alias = kind is torch.Tensor and self.is_leaf
            source = self.detach().requires_grad_(self.requires_grad) if alias else self
            copied = memo[id(self)] = kind.__deepcopy__(source, memo)  # type: ignore[attr-defined]
        copied.__class__ = kind
        return copied

    body = {
        "__torch_function__": classmethod(_wait_then_call),
        "__deepcopy__": deepcopy,
        "syncline_waits": True,
        "__module__": kind.__module__,
    }
    try:
        waiting: type = type(kind)(kind.__name__, (kind,), body)
        probe = torch.empty(0) if kind is torch.Tensor else None
        if probe is not None:
            probe.__class__ = waiting
    except TypeError:
        return None
    share_reducer(waiting, lambda tensor: settle_all([tensor]))
    _waiting_classes.add(waiting)
    return waiting
