"""Reading and writing `results.json`, and small helpers for its numbers."""

import json
import math
import os
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import read_json, reason, write_text
from syncline.results.schema import Results, Run, validate

FILE_NAME = "results.json"


def load(path: str | os.PathLike[str]) -> Results:
    """Read a results file, or the one inside a run folder; anything else is a `UsageError`."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise UsageError(f"there is no '{file}': give a run folder or its {FILE_NAME}") from None
    except OSError as error:
        raise UsageError(f"cannot read '{file}': {reason(error)}") from None
    except ValueError as error:
        raise UsageError(f"'{file}' is not a results file: {reason(error)}") from None
    return validate(content, name=str(file))


def save(results: Results, path: str | os.PathLike[str]) -> None:
    """Write `results` to `path` in one move: a reader sees the old file or the new one, never half of it."""
    write_text(json.dumps(strict(results), indent=1, allow_nan=False) + "\n", path)


def finite(value: Any) -> float | None:
    """`value` as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer with more digits than a float has
        return None


def numbers(values: Any) -> list[float]:
    """The finite numbers of a series."""
    return [v for v in map(finite, values or ()) if v is not None]


def ok(run: Run) -> bool:
    """Whether the run finished."""
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
