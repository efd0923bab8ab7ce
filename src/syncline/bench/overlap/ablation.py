"""Contestants of `bench overlap --ablation`: the engine with one more of its parts in each row (CaSync's ablation)."""

from collections.abc import Mapping
from typing import Any

from syncline import codecs
from syncline.bench.overlap.rows import Entry, compare
from syncline.errors import UsageError
from syncline.plan import ALWAYS

CODEC = "int8"
"""The default codec. With fewer bytes, small models would have nothing left to hide."""


def ablation(codec: str = CODEC) -> dict[str, str]:
    """What each row adds, and the strategy that runs it.

    >>> list(ablation("int8").values())[2:4]
    ['syncline(int8, schedule=fifo)', 'syncline(int8, schedule=ordered)']
    """
    name = str(codecs.build(codec))
    if name in ALWAYS:
        raise UsageError(f"--ablation with '{codec}': use a codec that auto may or may not choose, such as {CODEC}")
    return {
        "dense, no overlap": "syncline(schedule=serial)",
        "compression": f"syncline({name}, schedule=serial)",
        "overlap with backward, FIFO": f"syncline({name}, schedule=fifo)",
        "planned order": f"syncline({name}, schedule=ordered)",
        "batching of small units": f"syncline({name}, schedule=batched)",
        "selection of codecs": f"syncline(auto({name}), schedule=barrier, tune=full)",
        "overlap with the next forward": f"syncline(auto({name}), tune=full)",
    }


def label_rows(result: dict[str, Any], stages: Mapping[str, str]) -> None:
    """Add to each row of an ablation what it adds (`stage`), and how much faster than the first row it is."""
    names = {strategy: stage for stage, strategy in stages.items()}
    first = next((row for row in result["rows"] if row["strategy"] in names), None)
    for row in result["rows"]:
        row["stage"] = names.get(row["strategy"])
        if row["stage"] is not None and first is not None and row is not first:
            pair = (Entry(one["strategy"], turns=one["turns"]) for one in (row, first))
            row["times_faster_than_first"] = compare(*pair)
