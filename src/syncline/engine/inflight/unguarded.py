"""Functions that read a tensor without `__torch_function__`: replaced by ones that wait, while an engine is attached.

`_compat/unguarded.py` lists them: constructors such as `torch.tensor`, DLPack, `torch.func`, TorchScript, the process
groups' methods, and tensor subclasses that switch `__torch_function__` off for everybody.
`tests/engine/test_bypass_scan.py` calls all of torch's functions with a pending tensor to find missing ones.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from syncline._compat.compiled import note_functions_for_compile, script_methods
from syncline._compat.modules import script_tensors
from syncline._compat.replace_function import replace_function
from syncline._compat.tensors import swap_owner
from syncline._compat.unguarded import unguarded_by_class, unguarded_readers
from syncline.engine.inflight import wait_on_touch
from syncline.engine.inflight.module_waits import wait_in_forwards
from syncline.engine.inflight.replace import call_before, call_before_torch_functions, replace_imported_names
from syncline.errors import UsageError

_lock = threading.RLock()
_users: "list[weakref.WeakMethod[Callable[[Tensor], None]] | None]" = []
"""One for each engine that is attached; it is told of tensors whose memory was swapped. Weak: an engine may be lost."""
_undo: list[Callable[[], None]] = []


def guard_process(swapped: Callable[[Tensor], None] | None = None) -> Callable[[], None]:
    """Guard the whole process until the returned function is called as often as this one.

    `swapped(tensor)`, a method, is called when a tensor's content was exchanged by `torch.utils.swap_tensors`.
    """
    user = None if swapped is None else weakref.WeakMethod(swapped)
    with _lock:
        if not _users:
            _install()
        _users.append(user)
    ended = False

    def end() -> None:
        nonlocal ended
        with _lock:
            if ended:
                return
            ended = True
            _users.remove(user)
            if not _users:
                while _undo:
                    _undo.pop()()

    return end


def readers() -> list[tuple[Any, str]]:
    """The functions and methods that are replaced by ones which wait for their arguments: (owner, name)."""
    return unguarded_readers()


def _install() -> None:
    note_functions_for_compile()
    _undo.append(wait_on_touch.while_marked(wait_in_forwards))
    replaced: list[tuple[Any, Any]] = []
    for kinds, before in (
        (readers(), _wait_for_arguments),
        (unguarded_by_class(), _settle_arguments),
        (script_methods(), _wait_for_script_module),
    ):
        for owner, name in kinds:
            original, function, undo = call_before(owner, name, before)
            _undo.append(undo)
            replaced.append((original, function))
    _undo.append(replace_function(swap_owner(), "swap_tensors", _swap))
    _undo.append(replace_imported_names(replaced))
    _undo.append(call_before_torch_functions(_wait_for_arguments, but=wait_on_touch.is_waiting_class))


def _wait_for_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if wait_on_touch.any_marked():
        wait_on_touch.touch_all(wait_on_touch.find_marked(args, kwargs))


def _settle_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if wait_on_touch.any_marked():
        wait_on_touch.settle_all(wait_on_touch.find_marked(args, kwargs))


def _wait_for_script_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a method of a TorchScript module, which reads all its tensors in C++; `args[0]` is the method."""
    if wait_on_touch.any_marked():
        _wait_for_arguments(args[1:], kwargs)
        wait_on_touch.touch_all(script_tensors(args[0].owner))


def _swap(original: Callable[..., Any], first: Tensor, second: Tensor) -> None:
    wait_on_touch.settle_all([first, second])
    original(first, second)
    for user in list(_users):
        swapped = None if user is None else user()
        if swapped is not None:
            swapped(first)
            swapped(second)


class LostTicket:
    """The ticket of what was in flight in the parent when this process was forked."""

    marked: list[Tensor] | None = None

    def wait(self) -> None:
        """It never arrives."""
        raise UsageError(
            "this process was forked in the middle of a backward pass, and what was in flight then arrives in its"
            " parent only: fork before backward, or after sync.wait()"
        )

    def done(self) -> bool:
        """Whether it has arrived: never."""
        return False


# The child of a fork has none of the engine's threads, so the parent waits first.
os.register_at_fork(
    before=wait_on_touch.touch_everything, after_in_child=lambda: wait_on_touch.forget_tickets(LostTicket())
)
