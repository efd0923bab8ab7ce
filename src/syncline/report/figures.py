"""Numbers and names as text for the console, the verdicts and the pages: three significant digits, one unit."""

import math
import re
import unicodedata
from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from syncline.wording import plural as plural
from syncline.wording import scaled

NONE = "-"
"""Shown where a figure does not exist."""
Columns = Sequence[tuple[str, Callable[[Any], str]]]
"""Columns of a table: each heading with the function that formats a row's cell."""
P = ParamSpec("P")


def _or_dash(show: Callable[Concatenate[float, P], str]) -> Callable[Concatenate[float | None, P], str]:
    """Make a function show the dash where there is no finite number."""

    @wraps(show)
    def shown(value: float | None, /, *args: P.args, **options: P.kwargs) -> str:
        return NONE if value is None or not math.isfinite(value) else show(value, *args, **options)

    return shown


@_or_dash
def significant(value: float, *, digits: int = 3) -> str:
    """`value` with `digits` significant digits, never in scientific notation above 1e-4.

    >>> [significant(v) for v in (1234.5, 88.54, 0.01234, 0)]
    ['1234', '88.5', '0.0123', '0']
    """
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    text = f"{value:.{digits}g}"
    return f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text else text


def rounded(value: float | None) -> float | None:
    """`value` to six significant digits, for a chart: more cannot be seen and would double the page.

    >>> rounded(0.123456789)
    0.123457
    """
    return None if value is None else float(f"{value:.6g}")


@_or_dash
def duration(ms: float) -> str:
    """Milliseconds, as µs below 0.1 ms and as seconds from 10 s on.

    >>> duration(885.4), duration(22359.2), duration(0.0496), duration(None)
    ('885 ms', '22.4 s', '49.6 µs', '-')
    """
    if 0 < abs(ms) < 0.1:
        return f"{significant(ms * 1000)} µs"
    return f"{significant(ms / 1000)} s" if abs(ms) >= 10_000 else f"{significant(ms)} ms"


@_or_dash
def seconds(value: float) -> str:
    """Seconds, as `duration` shows them."""
    return duration(value * 1000)


def between(low: float | None, high: float | None) -> str:
    """Two bounds in ms, the unit left to the heading.

    >>> between(952.4, 1010.2)
    '952-1010'
    """
    ends = significant(low), significant(high)
    return NONE if NONE in ends else "-".join(ends)


@_or_dash
def size(count: float) -> str:
    """Bytes in decimal units.

    >>> size(221_400_000), size(512)
    ('221 MB', '512 B')
    """
    return scaled(count, "B")


@_or_dash
def percent(share: float) -> str:
    """A share of 1 as a percentage.

    >>> percent(0.6234), percent(0.004), percent(1.004)
    ('62%', '0.4%', '100%')
    """
    value = share * 100
    return f"{value:.0f}%" if abs(value) >= 9.95 or value == 0 else f"{value:.1f}%".replace(".0%", "%")


@_or_dash
def accuracy(share: float) -> str:
    """A share of correct answers, to a tenth of a percent."""
    return f"{share * 100:.1f}%"


@_or_dash
def times(ratio: float) -> str:
    """A ratio: `4.0x`, with two decimals below 2 and none from 20 on."""
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 1.95 else f"{ratio:.2f}x"


@_or_dash
def bandwidth(bits: float) -> str:
    """Bits a second in decimal units.

    >>> bandwidth(1_000_000_000), bandwidth(200e6), bandwidth(6.03e13)
    ('1 Gbit/s', '200 Mbit/s', '60.3 Tbit/s')
    """
    return scaled(bits, "bit/s")


@_or_dash
def number(value: float, *, digits: int = 4) -> str:
    """A plain number."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def printable(text: object) -> str:
    """`text` without control or direction characters, which could rewrite a terminal or reverse a page."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in str(text))


def unbroken(text: str) -> str:
    """`text` with its formulas kept on one line: a browser may break `2(N-1)S` after the hyphen.

    >>> unbroken("2(N-1)S, all-reduce") == "2(N-\\u20601)S, all-reduce"
    True
    """
    return re.sub(r"-(?=\d)", "-\u2060", text)


def word_pieces(name: str) -> list[str]:
    """A long name cut where a line may end: after a bracket, a comma or a bar, never inside a word.

    >>> word_pieces("syncline(powersgd(rank=4)|bf16)")
    ['syncline(', 'powersgd(', 'rank=4)|', 'bf16)']
    """
    return re.split(r"(?<=[(,|])", name)


def one_line(text: object, *, limit: int = 160) -> str:
    """The first line of `text`, printable, cut at `limit` characters."""
    line = next((part.strip() for part in printable(text).splitlines() if part.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def tabulate(columns: Columns, rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """The headings of a table, and the cells of its rows."""
    return [head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows]


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> str:
    """Plain text in columns, right-aligned except the columns in `left`.

    >>> print(text_table(["codec", "ms"], [["int8", "1.5"], ["none", "10"]]))
    codec   ms
    int8   1.5
    none    10
    """
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
