"""The results file: what a comparison writes (`results.json`) and every report reads.

Times are milliseconds unless the name says `_s`, sizes are bytes, shares and accuracies lie in 0..1. A number
that does not exist (a loss that overflowed, a figure of a crashed run) is null: the file is strict JSON.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from syncline.errors import UsageError
from syncline.files import write_text

SCHEMA = 1
"""The version this code writes; it reads this one and older ones."""

FILE_NAME = "results.json"

SHARES = ("data", "forward", "backward", "exposed_encode", "exposed_exchange", "wait", "update", "other")
"""The parts of a step, an exclusive partition: on every rank they sum to the step's wall time."""


class Summary(TypedDict):
    """A distribution of step times in ms, the first step left out."""

    median: float | None
    mean: float | None
    p95: float | None
    std: float | None
    q1: float | None
    q3: float | None
    n: int


class Failure(TypedDict):
    """Why a run crashed: the first rank that failed, one line, and its whole traceback."""

    rank: int
    summary: str
    traceback: str


class Wire(TypedDict):
    """Where `wire_bytes_per_step` comes from, and what the strategy's formula says (S: bytes of gradients)."""

    measured: bool
    theory_bytes: float | None
    formula: str


class RankWire(TypedDict):
    """Bytes one rank sent and received a step, beside the formula's."""

    sent: float | None
    received: float | None
    theory_sent: float | None
    theory_received: float | None
    measured: bool


class Rank(TypedDict, total=False):
    """One rank's own figures."""

    rank: int
    node: int
    host: str
    step_ms: Summary
    first_step_ms: float | None
    loss: list[float | None]
    step_ms_series: list[float | None]
    test_accuracy: float | None
    breakdown: dict[str, float | None]
    wire: RankWire
    planned_at: list[int]
    """Steps that were over when a plan came into use: the first one, and one for each drift."""


class Epoch(TypedDict):
    """One pass over the data."""

    epoch: int
    train_s: float | None
    test_s: NotRequired[float | None]
    loss: NotRequired[float | None]


class LinkChange(TypedDict):
    """From `step` on (counted from 0), the links carry `bandwidth` bits/s; null when nothing shapes them."""

    step: int
    bandwidth: int | None


class Run(TypedDict, total=False):
    """One strategy at one world size. A crashed run holds `error` and whatever was computed before."""

    strategy: str
    status: str
    error: Failure | None
    world_size: int
    servers: int
    nodes: int
    batch: int
    step_ms: Summary
    step_ms_series: list[float | None]
    first_step_ms: float | None
    startup_ms: dict[str, float | None]
    loss: list[float | None]
    test_accuracy: float | None
    test_loss: float | None
    samples_per_s: float | None
    syncs_per_s: float | None
    synchronised_bytes: int
    wire_bytes_per_step: float | None
    wire: Wire
    breakdown: dict[str, float | None]
    epochs: list[Epoch]
    buffer_divergence: float | None
    planned_at: list[int]
    link_changes: list[LinkChange]
    ranks: list[Rank]


class Network(TypedDict):
    """The links between nodes; `bandwidth` in bits/s, null when nothing shapes them."""

    emulated: bool
    nodes: int
    bandwidth: int | None
    note: NotRequired[str | None]
    changes: NotRequired[list[LinkChange]]


class Results(TypedDict):
    """The whole file."""

    schema: int
    syncline: str
    created: str
    title: str
    config: dict[str, Any]
    environment: dict[str, Any]
    network: Network
    warnings: list[str]
    runs: list[Run]


def load(path: str | os.PathLike[str]) -> Results:
    """Read a results file, or the one inside a run folder; anything else is a `UsageError`."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no '{file}': give a run folder or its {FILE_NAME}") from None
    except OSError as error:
        raise UsageError(f"cannot read '{file}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{file}' is not a results file: {_first_line(error)}") from None
    return validate(content, name=str(file))


def save(results: Results, path: str | os.PathLike[str]) -> None:
    """Write `results` to `path` in one move: a reader sees the old file or the new one, never half of it."""
    text = json.dumps(strict(results), indent=1, allow_nan=False) + "\n"
    write_text(text, path)


def validate(content: Any, *, name: str = "these results") -> Results:
    """`content` as `Results`, or a `UsageError` that names the first place that is wrong."""
    from syncline.results.schema import check

    check(content, name=name)
    return cast(Results, content)


def finite(value: Any) -> float | None:
    """`value` as a float, or None where there is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of more digits than a float has
        return None


def numbers(values: Any) -> list[float]:
    """The finite numbers of a series."""
    return [v for v in map(finite, values or ()) if v is not None]


def ok(run: Run) -> bool:
    """Whether the run went through to its end."""
    return run.get("status") == "ok"


def strict(value: Any) -> Any:
    """`value` with null for every number that JSON does not have."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
