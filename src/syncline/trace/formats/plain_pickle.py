"""Reads pickles that hold plain containers and scalars only, without running anything that is in them.

A pickle is a program. Every opcode is checked against a list before the first one is carried out: those that import a
name, call something or build an object are not on it.
"""

import io
import pickle
import pickletools
from typing import Any

PLAIN = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE",
    "BINGET", "LONG_BINGET",
})  # fmt: skip
"""The opcodes that make plain values."""


class _NoNames(pickle.Unpickler):
    """An unpickler that finds no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it asks for {module}.{name}")


def loads(data: bytes) -> Any:
    """The value of a pickle of lists, tuples, dicts, texts, numbers, booleans and None; `ValueError` for all others."""
    count = end = 0
    for opcode, argument, place in pickletools.genops(data):
        if opcode.name not in PLAIN:
            raise ValueError(f"it holds more than plain values ({opcode.name} at byte {place})")
        # The memo is an array: one large index would take all memory.
        if opcode.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise ValueError(f"it is damaged at byte {place}")
        count, end = count + 1, place or 0
    if end + 1 != len(data):
        raise ValueError(f"{len(data) - end - 1} bytes follow after its end")
    try:
        return _NoNames(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, IndexError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from None
