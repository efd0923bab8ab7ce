"""The schema of `results.json` as types, and `validate`, which checks parsed JSON against these types.

Times are milliseconds unless the name says `_s`, sizes are bytes, shares and accuracies lie in 0..1. A number
that does not exist (a loss that overflowed, a figure of a crashed run) is null: the file is strict JSON. A key that is
`NotRequired` may be missing in files of earlier versions; keys that are not listed here are ignored.
"""

from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypedDict,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from syncline.errors import UsageError
from syncline.stats import Summary

SCHEMA = 1
"""The version this code writes; it reads this one and older ones."""

AT_MOST = " at most"
"""The end of a formula that is an upper bound: the strategy chooses what it sends while it trains."""

_LARGEST = 1e300  # beyond it, arithmetic on two figures would overflow
_MOST_LEVELS = 32


Count = Annotated[int, 0]
"""A whole number; the annotation is the smallest legal value."""
Positive = Annotated[int, 1]
Number = float | None
Series = list[float | None]


class Failure(TypedDict):
    """Why a run crashed: the first rank that failed, one line, and its whole traceback."""

    rank: int
    summary: str
    traceback: NotRequired[str]


class Wire(TypedDict, total=False):
    """The source of `wire_bytes_per_step`, and the strategy's formula for it (S: bytes of gradients)."""

    measured: bool
    theory_bytes: Number
    formula: str


class RankWire(TypedDict, total=False):
    """Bytes that one rank sent and received per step, beside those of the formula."""

    sent: Number
    received: Number
    theory_sent: Number
    theory_received: Number
    measured: bool


class Figures(TypedDict, total=False):
    """The figures that a rank and a run both have."""

    step_ms: Summary
    step_ms_series: Series
    first_step_ms: Number
    loss: Series
    test_accuracy: Number
    train_accuracy: Number
    """On some training samples, at the end."""
    peak_memory_bytes: Number
    """Above what the process had before the model: allocated by torch on a GPU, resident memory on the CPU."""
    breakdown: dict[str, Number]
    planned_at: list[Count]
    """The steps at which a plan came into use: the first one, and one for each drift."""
    guarded_at: list[Count]
    """The steps at which units got other codecs, because of the errors of the running ones."""


class Rank(Figures, total=False):
    """The figures of one rank."""

    rank: Required[Count]
    node: Count
    host: str
    wire: RankWire


class Epoch(TypedDict):
    """One pass over the data."""

    epoch: Count
    train_s: Number
    test_s: NotRequired[Number]
    loss: NotRequired[Number]
    accuracy: NotRequired[Number]
    """On the test set, after the epoch."""
    test_loss: NotRequired[Number]
    """On the test set; measured where blocks freeze."""
    frozen: NotRequired[Count]
    """Frozen blocks of the model in the next epoch."""


class Restructuring(TypedDict):
    """A freeze or a reshape: its cost, and how much shorter steps are after it. It has paid after `payback_steps`."""

    step: Count
    kind: str
    what: str
    cost_ms: Number
    saved_ms: Number
    """Milliseconds per step: the median step before it minus the one after it."""
    payback_steps: Number
    """Null where steps did not get shorter."""
    steps_after: NotRequired[Count]
    """Steps of the run after it."""


class LinkChange(TypedDict):
    """From `step` on (counted from 0), the links carry `bandwidth` bits/s; null means without a limit."""

    step: Count
    bandwidth: int | None


class Run(Figures, total=False):
    """One strategy at one world size. A crashed run has `error` and the figures computed before the crash."""

    strategy: Required[str]
    status: Required[Literal["ok", "crashed"]]
    error: Failure | None
    world_size: Positive
    servers: Count
    nodes: Count
    batch: Positive
    startup_ms: dict[str, Number]
    test_loss: Number
    samples_per_s: Number
    syncs_per_s: Number
    synchronised_bytes: Number
    wire_bytes_per_step: Number
    wire: Wire
    epochs: list[Epoch]
    buffer_divergence: Number
    link_changes: list[LinkChange]
    restructurings: list[Restructuring]
    ranks: list[Rank]


_REQUIRED_BY_STATUS = {
    "ok": ("world_size", "step_ms", "loss", "samples_per_s", "breakdown"),
    "crashed": ("error",),
}


class Network(TypedDict, total=False):
    """The links between nodes; `bandwidth` in bits/s, null means without a limit."""

    emulated: bool
    nodes: Count
    bandwidth: int | None
    note: str | None
    changes: list[LinkChange]


class Results(TypedDict, total=False):
    """The whole file."""

    schema: Required[Positive]
    syncline: str
    created: str
    title: str
    config: dict[str, Any]
    environment: dict[str, Any]
    network: Network
    warnings: list[str]
    runs: Required[list[Run]]


def validate(content: Any, *, name: str = "these results") -> Results:
    """`content` as `Results`, or a `UsageError` that names the first field that is wrong."""
    if not isinstance(content, dict) or "schema" not in content or "runs" not in content:
        raise UsageError(f"{name}: not a Syncline results file (it has no 'schema' and 'runs')")
    version = content["schema"]
    if isinstance(version, int) and version > SCHEMA:
        raise UsageError(
            f"{name}: written by a newer Syncline (schema {version}, this one reads up to {SCHEMA}); upgrade syncline"
        )
    try:
        _check(content, Results, "")
        for index, run in enumerate(content["runs"]):
            missing = [key for key in _REQUIRED_BY_STATUS[run["status"]] if key not in run]
            if missing:
                raise UsageError(f"runs[{index}].{missing[0]} is missing")
            if run["status"] == "crashed":
                _check(run["error"], Failure, f"runs[{index}].error")
    except UsageError as wrong:
        raise UsageError(f"{name} is malformed: {wrong}; run the comparison again to rewrite it") from None
    return cast(Results, content)


def _check(value: Any, kind: Any, path: str) -> None:
    """Raise a `UsageError` that says where `value`, found at `path`, does not match the type `kind`."""
    allowed = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    matching = next((one for one in allowed if _matches(value, one)), None)
    if matching is None:
        expected = " or ".join(_expected(one) for one in allowed)
        raise UsageError(f"{path or 'the file'} is {_FOUND[type(value)]}, {expected} is expected")
    if isinstance(value, int | float) and _LARGEST < abs(value) < float("inf"):
        raise UsageError(f"{path} is too large a number")
    arguments = get_args(matching)
    if is_typeddict(matching):
        for key, inner in _fields(matching).items():
            inside = f"{path}.{key}" if path else key
            if key in value:
                _check(value[key], inner, inside)
            elif key in matching.__required_keys__:
                raise UsageError(f"{inside} is missing")
    elif get_origin(matching) is Annotated and value < arguments[1]:
        raise UsageError(f"{path} is {value}, at least {arguments[1]} is expected")
    elif get_origin(matching) is list:
        for index, item in enumerate(value):
            _check(item, arguments[0], f"{path}[{index}]")
    elif get_origin(matching) is dict and arguments[1] is Any:
        _check_depth(value, path)
    elif get_origin(matching) is dict:
        for key, item in value.items():
            _check(item, arguments[1], f"{path}.{key}")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """The types of a TypedDict's keys, without `Required` and `NotRequired`."""
    hints = get_type_hints(kind, include_extras=True)
    return {k: get_args(h)[0] if get_origin(h) in (Required, NotRequired) else h for k, h in hints.items()}


def _check_depth(value: dict[str, Any], path: str) -> None:
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        level = [i for v in level for i in (v.values() if isinstance(v, dict) else v) if isinstance(i, dict | list)]
        if not level:
            return
    raise UsageError(f"{path} is nested more than {_MOST_LEVELS} deep")


def _matches(value: Any, kind: Any) -> bool:
    """Whether `value` is of the outermost type of `kind`, its content not looked at."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    outer = _outer(kind)
    return type(value) is outer or (outer is float and type(value) is int)


def _outer(kind: Any) -> Any:
    if is_typeddict(kind):
        return dict
    return get_args(kind)[0] if get_origin(kind) is Annotated else get_origin(kind) or kind


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _EXPECTED[_outer(kind)]


_FOUND = {
    bool: "a flag",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
    NoneType: "null",
}
_EXPECTED = _FOUND | {bool: "true or false", int: "a whole number"}
