"""Replaces functions of torch by ones that do something first: module functions, methods, imported names, subclasses.

Everything here returns a function that restores what was there.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from syncline._compat.compiled import let_script_know

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Is called with the arguments of a function, before it."""


def call_before(owner: Any, name: str, before: Before) -> tuple[Any, Any, Callable[[], None]]:
    """Call `before(args, kwargs)` before a function of a module, or a method of a class.

    Returns the original, the function in its place, and a function that restores the original.
    """
    original, own = getattr(owner, name), name in vars(owner)
    kept = vars(owner).get(name)
    active = True

    def called(*args: Any, **kwargs: Any) -> Any:
        if active and not torch.compiler.is_compiling():
            before(args, kwargs)
        return original(*args, **kwargs)

    with suppress(AttributeError):
        functools.update_wrapper(called, original)
    static = isinstance(inspect.getattr_static(owner, name), staticmethod) or name in ("__new__", "_make_subclass")
    function: Any = staticmethod(called) if static else called

    def restore() -> None:
        nonlocal active
        active = False
        forget()
        if vars(owner).get(name) is not function:
            return  # somebody has replaced ours, and calls it
        if own:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)

    setattr(owner, name, function)
    forget = let_script_know(original, called)
    return original, called, restore


def replace_imported_names(replaced: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
    """Replace functions in modules that imported them by name (`from torch import tensor`), but torch's own.

    `replaced` holds pairs of an original and the function for its place. Returns a function that restores the names.
    """
    functions = {id(original): function for original, function in replaced}
    ids = set(functions)
    changed: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if names is None or module_name == "torch" or module_name.startswith(("torch.", "syncline.engine.inflight")):
            continue
        if ids.isdisjoint(map(id, list(names.values()))):
            continue  # nearly all of some thousand modules, so that a loop over their names would delay attach
        for name, value in list(names.items()):
            if id(value) in functions:
                changed.append((names, name, value, functions[id(value)]))
    for names, name, _, function in changed:
        names[name] = function

    def restore() -> None:
        for names, name, original, function in changed:
            if names.get(name) is function:
                names[name] = original

    return restore


def call_before_torch_functions(before: Before, *, but: Callable[[type], bool]) -> Callable[[], None]:
    """Call `before(args, kwargs)` before `__torch_function__` of all tensor subclasses that define their own.

    Such a class comes first where one of its tensors is the first argument, and may switch off that of the others.
    Classes that are defined later are included, those for which `but` holds are not. Returns a function that ends this.
    """
    undo: list[Callable[[], None]] = []

    def include(kind: type) -> None:
        own = vars(kind).get("__torch_function__")
        if not isinstance(own, classmethod) or but(kind):
            return
        inner = own.__func__

        @functools.wraps(inner)
        def called(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not torch.compiler.is_compiling():
                before(args, kwargs or {})
            return inner(cls, func, types, args, kwargs or {})

        ours: Any = classmethod(called)
        owner: Any = kind
        owner.__torch_function__ = ours

        def restore() -> None:
            if vars(kind).get("__torch_function__") is ours:
                owner.__torch_function__ = own

        undo.append(restore)

    tensor: Any = torch.Tensor

    def defined(kind: Any, /, **options: Any) -> None:
        super(tensor, kind).__init_subclass__(**options)
        include(kind)

    for known in dict.fromkeys(_below(tensor)):
        include(known)
    hook: Any = classmethod(defined)
    tensor.__init_subclass__ = hook

    def end() -> None:
        if vars(tensor).get("__init_subclass__") is hook:
            del tensor.__init_subclass__
        for restore in reversed(undo):
            restore()

    return end


def _below(kind: type) -> Iterator[type]:
    """All subclasses of a class."""
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        yield child
        yield from _below(child)
