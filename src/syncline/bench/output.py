"""Output of the benchmarks: environment, JSON files, tables in pages, lines of progress with the time that is left."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from syncline.errors import UsageError
from syncline.files import read_json, write_text


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware on which the figures depend."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "device": str(name), "threads": torch.get_num_threads()}


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write the result atomically."""
    write_text(json.dumps(result, indent=1) + "\n", path)


def read_result(path: Path) -> dict[str, Any]:
    """The result of an earlier run."""
    try:
        result = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; give the JSON file that --out has written") from None
    if not isinstance(result, dict) or "rows" not in result:
        raise UsageError(f"{path} is no result of a benchmark: give the JSON file that --out has written")
    return result


def markdown_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    r"""A table of a page.

    >>> print(markdown_table(["way", "ratio"], [["powersgd | bf16", "1.00"]]))
    | way | ratio |
    | --- | --- |
    | powersgd \| bf16 | 1.00 |
    """
    lines = (headings, ["---"] * len(headings), *cells)
    return "\n".join("| " + " | ".join(text.replace("|", r"\|") for text in line) + " |" for line in lines)


def write_between(page: Path, name: str, text: str) -> None:
    """Put a text between the lines `<!-- NAME -->` and `<!-- /NAME -->` of a page."""
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.read_text().partition(first)
    _, mark, after = rest.partition(last)
    if not mark:
        raise UsageError(f"{page} has no place for the tables: add the lines '{first.strip()}' and '{last}'")
    write_text(f"{before}{first}{text}\n{last}{after}", page)


class Countdown:
    """Progress of equal parts of work: a line every few seconds, with the time that is left at the pace so far."""

    def __init__(self, total: int, progress: Callable[[str], None], *, every_s: float = 5.0) -> None:
        self._total, self._progress, self._every = total, progress, every_s
        self._began = self._said = time.monotonic()
        self._done = 0

    def part_done(self, what: str) -> None:
        """One more part is done; `what` describes it."""
        self._done += 1
        now = time.monotonic()
        if now - self._said >= self._every and self._done < self._total:
            self._said = now
            left = (now - self._began) / self._done * (self._total - self._done)
            self._progress(f"{what}; about {_duration(left)} left")


def _duration(seconds: float) -> str:
    """
    >>> _duration(8), _duration(100), _duration(700)
    ('10 s', '100 s', '12 min')
    """
    return f"{max(10, round(seconds, -1)):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
