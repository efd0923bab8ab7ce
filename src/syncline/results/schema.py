"""Checks that a parsed results file is one of ours: small checkers, composed into the shape of the schema."""

from collections.abc import Callable, Mapping
from typing import Any

from syncline.errors import UsageError
from syncline.results.file import SCHEMA, SHARES

Check = Callable[[Any, str], None]
_LARGEST = 1e300  # beyond it, arithmetic on two figures would overflow
_DEEPEST = 32


class _Wrong(Exception):
    """Where and what; becomes the `UsageError`."""


def check(content: Any, *, name: str) -> None:
    """Raise the `UsageError` that names the first place where `content` leaves the schema."""
    if not isinstance(content, dict) or "schema" not in content or "runs" not in content:
        raise UsageError(f"{name}: not a Syncline results file (it has no 'schema' and 'runs')")
    version = content["schema"]
    if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA:
        raise UsageError(
            f"{name}: written by a newer Syncline (schema {version}, this one reads up to {SCHEMA}); upgrade syncline"
        )
    try:
        _RESULTS(content, "")
    except _Wrong as wrong:
        raise UsageError(f"{name} is malformed: {wrong}; run the comparison again to rewrite it") from None


def _kind(*types: type, says: str) -> Check:
    def run(value: Any, path: str) -> None:
        if (isinstance(value, bool) and bool not in types) or not isinstance(value, types):
            raise _Wrong(f"{path or 'the file'} is {_describe(value)}, {says} is expected")
        if isinstance(value, int | float) and abs(value) > _LARGEST and value not in (_INF, -_INF):
            raise _Wrong(f"{path} is too large a number")

    return run


_INF = float("inf")
_text = _kind(str, says="text")
_flag = _kind(bool, says="true or false")
_whole = _kind(int, says="a whole number")
_number = _kind(int, float, type(None), says="a number or null")


def _count(value: Any, path: str) -> None:
    _whole(value, path)
    if value < 0:
        raise _Wrong(f"{path} is negative")


def _positive(value: Any, path: str) -> None:
    _whole(value, path)
    if value < 1:
        raise _Wrong(f"{path} is {value}, at least 1 is expected")


def _status(value: Any, path: str) -> None:
    if value not in ("ok", "crashed"):
        raise _Wrong(f"{path} is {_describe(value)}, 'ok' or 'crashed' is expected")


def _optional(inner: Check) -> Check:
    return lambda value, path: None if value is None else inner(value, path)


def _each(inner: Check) -> Check:
    def run(value: Any, path: str) -> None:
        _kind(list, says="a list")(value, path)
        for index, item in enumerate(value):
            inner(item, f"{path}[{index}]")

    return run


def _table(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    def run(value: Any, path: str) -> None:
        _kind(dict, says="a table")(value, path)
        dot = f"{path}." if path else ""
        for key in required:
            if key not in value:
                raise _Wrong(f"{dot}{key} is missing")
        for key, inner in {**required, **(optional or {})}.items():
            if key in value:
                inner(value[key], f"{dot}{key}")

    return run


def _shallow(value: Any, path: str) -> None:
    _kind(dict, says="a table")(value, path)
    level = [value]
    for _ in range(_DEEPEST):
        level = [i for v in level for i in (v.values() if isinstance(v, dict) else v) if isinstance(i, dict | list)]
        if not level:
            return
    raise _Wrong(f"{path} is nested more than {_DEEPEST} deep")


def _run(value: Any, path: str) -> None:
    _RUN(value, path)
    if value["status"] == "ok":
        _OK(value, path)
    else:
        _table({"error": _FAILURE})(value, path)


def _describe(value: Any) -> str:
    names = {str: "text", bool: "a flag", int: "a number", float: "a number", list: "a list", dict: "a table"}
    return names.get(type(value), "null")


_SUMMARY = _table(
    dict.fromkeys(("median", "mean", "p95"), _number), {"n": _count} | dict.fromkeys(("std", "q1", "q3"), _number)
)
_SERIES = _each(_number)
_PARTS = _table({}, dict.fromkeys(SHARES, _number))
_FAILURE = _table({"rank": _whole, "summary": _text}, {"traceback": _text})
_WIRE = _table({}, {"measured": _flag, "theory_bytes": _number, "formula": _text})
_RANK = _table(
    {"rank": _count},
    {
        "node": _count,
        "host": _text,
        "step_ms": _SUMMARY,
        "first_step_ms": _number,
        "loss": _SERIES,
        "step_ms_series": _SERIES,
        "test_accuracy": _number,
        "breakdown": _PARTS,
        "planned_at": _each(_count),
        "wire": _table(
            {}, {"measured": _flag} | dict.fromkeys(("sent", "received", "theory_sent", "theory_received"), _number)
        ),
    },
)
_CHANGES = _each(_table({"step": _count, "bandwidth": _number}))
_EPOCH = _table({"epoch": _count, "train_s": _number}, {"test_s": _number, "loss": _number})
_RUN = _table(
    {"strategy": _text, "status": _status},
    {
        "error": _optional(_FAILURE),
        "world_size": _positive,
        "servers": _count,
        "nodes": _count,
        "batch": _positive,
        "step_ms": _SUMMARY,
        "step_ms_series": _SERIES,
        "startup_ms": _kind(dict, says="a table"),
        "loss": _SERIES,
        "synchronised_bytes": _number,
        "wire": _WIRE,
        "breakdown": _PARTS,
        "epochs": _each(_EPOCH),
        "planned_at": _each(_count),
        "link_changes": _CHANGES,
        "ranks": _each(_RANK),
    }
    | dict.fromkeys(("first_step_ms", "test_accuracy", "test_loss", "samples_per_s", "syncs_per_s"), _number)
    | dict.fromkeys(("wire_bytes_per_step", "buffer_divergence"), _number),
)
_OK = _table(
    {"world_size": _positive, "step_ms": _SUMMARY, "loss": _SERIES, "samples_per_s": _number, "breakdown": _PARTS}
)
_RESULTS = _table(
    {"schema": _positive, "runs": _each(_run)},
    {
        "syncline": _text,
        "created": _text,
        "title": _text,
        "config": _shallow,
        "environment": _shallow,
        "network": _table(
            {},
            {
                "emulated": _flag,
                "nodes": _count,
                "bandwidth": _number,
                "note": _optional(_text),
                "changes": _CHANGES,
            },
        ),
        "warnings": _each(_text),
    },
)
