"""Rows of `bench causes`: whether a verdict is right and its milliseconds true; the confusion matrix."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from syncline.bench.causes.cases import CAUSES, LOOPS, Case
from syncline.bench.output import markdown_table
from syncline.trace.analysis.analyze import Analysis

CLOSE = 0.2
"""The largest error of the recoverable time, as a share of the time that the cause costs."""


def row(case: Case, slow: Analysis, quick: Analysis) -> dict[str, Any]:
    """A case with its verdict, compared with what was injected and with what that cost."""
    verdict = slow.verdict
    cost = slow.step_ms["usual"] - quick.step_ms["usual"]
    # What the loop loses by the same cause without the injection is not part of its cost.
    left = next((finding.gain for finding in quick.findings if finding.kind == verdict.kind), 0.0)
    said = verdict.gain - left
    right = verdict.kind in CAUSES[case.cause].kinds and _names_ranks(case, verdict.sentence)
    return {
        **asdict(case),
        "verdict": verdict.as_json(),
        "findings": {finding.kind: finding.gain for finding in slow.findings},
        "step_ms": {"with": slow.step_ms["usual"], "without": quick.step_ms["usual"]},
        "cost_ms": cost,
        "recoverable_ms": said,
        "right": right,
        "close": right and abs(said - cost) <= CLOSE * cost,
        "queue_ms": {"with": slow.queue_ms, "without": quick.queue_ms},
    }


def _names_ranks(case: Case, sentence: str) -> bool:
    """Whether a sentence names the ranks that are late and no others; if all are late, none need be named."""
    return len(case.late) in (0, case.ranks) or named_ranks(sentence) == set(case.late)


def named_ranks(sentence: str) -> set[int]:
    """The ranks with which a sentence begins.

    >>> named_ranks("Ranks 0, 2-3 (host b) are late together"), named_ranks("Rank 1 is late")
    ({0, 2, 3}, {1})
    """
    found = re.match(r"Ranks? (\d[\d, and-]*)", sentence)
    ends = [part.split("-") for part in re.findall(r"\d+-\d+|\d+", found[1] if found else "")]
    return {rank for end in ends for rank in range(int(end[0]), int(end[-1]) + 1)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all rows."""
    return {
        "runs": len(rows),
        "right": sum(one["right"] for one in rows),
        "close": sum(one["close"] for one in rows),
    }


def matrix(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: a row per cause, how often each verdict came first, and how many were right and close."""
    expected = [kind for cause in CAUSES.values() for kind in cause.kinds]
    seen = {one["verdict"]["kind"] for one in rows}
    kinds = [*dict.fromkeys(kind for kind in expected if kind in seen), *sorted(seen - set(expected))]
    cells = []
    for name in CAUSES:
        mine = [one for one in rows if one["cause"] == name]
        if mine:
            count = Counter(one["verdict"]["kind"] for one in mine)
            cells.append([name, *(str(count[kind] or "") for kind in kinds), *_shares(mine)])
    return ["injected", *kinds, "right", f"within {CLOSE:.0%}"], [*cells, ["all", *[""] * len(kinds), *_shares(rows)]]


def by_loop(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: for each cause and loop, right verdicts of all runs."""
    cells = []
    for name in CAUSES:
        mine = [one for one in rows if one["cause"] == name]
        of = [[one for one in mine if one["loop"] == loop] for loop in LOOPS]
        if mine:
            cells.append([name, *(_shares(some)[0] if some else "" for some in of)])
    return ["right, by loop", *LOOPS], cells


def _shares(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{sum(one[key] for one in rows)} of {len(rows)}" for key in ("right", "close")]


def markdown(result: dict[str, Any]) -> str:
    """Both tables as `docs/analysis.md` shows them."""
    return "\n\n".join(markdown_table(*table(result["rows"])) for table in (matrix, by_loop))
