"""Rows and table of `bench recorder`, from the records of the ranks and their traces."""

import math
from collections.abc import Sequence
from typing import Any

from syncline.bench.timing import ratios, summarize
from syncline.stats import mean, median, median_interval

MAX_COST, MAX_ERROR = 0.01, 0.01
"""The most that recording may add to a step, and the largest error of the sum of phases against wall time."""
HEADINGS = (
    "way", "step ms", "recorded", "on/off", "CPU on/off", "thread on/off", "counted", "spans", "partition off by",
)  # fmt: skip
_TIMES = ("step", "cpu", "thread")


def warnings(line: dict[str, Any]) -> list[str]:
    """Sentences about figures of a way that are outside the bounds, or not shown to be inside them."""
    found, every = [], f"{line['way']}: recording one step in {line['sampled']['every']}"
    if line["sampled"]["ratio"]["step"]["median"] > 1 + MAX_COST:
        found.append(f"{every} took more than {MAX_COST:.0%} of the time, by blocks")
    if line["in_turn"]["default"]["interval"][1] > 1 + MAX_COST:
        found.append(f"{every} is not shown to take less than {MAX_COST:.0%} of the time, by steps")
    if not line["partition_error"]["worst"] <= MAX_ERROR:
        found.append(f"{line['way']}: the partition is more than {MAX_ERROR:.0%} from the wall time")
    return found


def row(name: str, records: Sequence[dict[str, Any]], traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a way with every step recorded; under `sampled`, with the default sampling interval."""
    mine = [record["ways"][name] for record in records]
    made: dict[str, Any] = {"way": name, **compared(mine, "on", "off")}
    sampled = {"every": mine[0]["every"], "steps": mine[0]["sampled_steps"], "rounds": len(mine[0]["sampled"]["step"])}
    made["sampled"] = sampled | compared(mine, "sampled", "sampled_off")
    made["in_turn"] = in_turn(mine, name, sampled["every"])
    counted = median([trace["recorder"]["overhead_ns_per_step"] for trace in traces]) / 1e6
    made["counted_ms"] = counted
    made["counted_share"] = counted / made["step_ms"]["off"]["median"]
    made["spans_per_step"] = median([trace["recorder"]["spans_per_step"] for trace in traces])
    made["partition_error"] = _partition_errors(mine, traces)
    return made


def compared(ranks: Sequence[dict[str, Any]], on: str, off: str) -> dict[str, Any]:
    """Medians and quartiles over the blocks, and ratios of on to off by round.

    Ranks wait for each other, so a block is one sample: the mean over the ranks.
    """
    made: dict[str, Any] = {"ratio": {}}
    for kind in _TIMES:
        recorded, plain = (_mean_of_ranks([rank[state][kind] for rank in ranks]) for state in (on, off))
        made[f"{kind}_ms"] = {"on": summarize(recorded), "off": summarize(plain)}
        made["ratio"][kind] = _paired(recorded, plain)
    return made


def _paired(on: Sequence[float], off: Sequence[float]) -> dict[str, Any]:
    """Ratios of neighbours: median, quartiles, confidence interval of the median, and ratio of the fastest tenths."""
    pairs = ratios(on, off)
    interval = list(median_interval(pairs))
    return {**summarize(pairs), "interval": interval, "floor": _floor(on) / _floor(off)}


def _mean_of_ranks(values: Sequence[Sequence[float]]) -> list[float]:
    return [mean(block) for block in zip(*values, strict=True)]


def in_turn(ranks: Sequence[dict[str, Any]], name: str, every: int) -> dict[str, Any]:
    """Recorded / unrecorded step-time ratio, and the ratio that follows for the default of one step in `every`."""
    on, off = (_mean_of_ranks([rank["in_turn"][kind] for rank in ranks]) for kind in ("on", "off"))
    ratio = _paired(on, off)
    # With an attached model the recorder also works in the steps before and after.
    share = min(1.0, (1 if name == "ddp" else 3) / every)
    default = {"share": share, "ratio": 1 + share * (ratio["median"] - 1)}
    default["interval"] = [1 + share * (end - 1) for end in ratio["interval"]]
    times = {"on": summarize(on), "off": summarize(off)}
    return {"step_ms": times, "ratio": ratio, "default": default}


def _floor(samples: Sequence[float]) -> float:
    """Mean of the fastest tenth: the time of a block without disturbance."""
    fastest = sorted(samples)[: max(1, len(samples) // 10)]
    return sum(fastest) / len(fastest)


def _partition_errors(mine: Sequence[dict[str, Any]], traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Error of the sum of a block's phases against its wall time, for every rank: worst block and median."""
    ranks = {}
    for rank, record in enumerate(mine):
        sums = [trace["ms"].get(rank, math.nan) for trace in traces]
        errors = [abs(total / wall - 1) for total, wall in zip(sums, record["on"]["step"], strict=True)]
        ranks[str(rank)] = {"worst": max(errors), "median": median(errors)}
    return {"worst": max(entry["worst"] for entry in ranks.values()), "ranks": ranks}


def table(result: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings and cells: four lines for each way, medians with their 95% intervals."""
    return HEADINGS, [cells for line in result["rows"] for cells in _lines(line)]


def _lines(line: dict[str, Any]) -> list[list[str]]:
    sampled, turns = line["sampled"], line["in_turn"]
    default = turns["default"] | {"median": turns["default"]["ratio"]}
    every = f"1 in {sampled['every']}"
    last = [f"{line['counted_share']:.3%}", f"{line['spans_per_step']:.0f}", f"{line['partition_error']['worst']:.2%}"]
    return [
        [line["way"], *_cells(turns, f"{every}, by steps", [default]), *[""] * 5],
        ["", *_cells(turns, "in turn", [turns["ratio"]]), *[""] * 5],
        ["", *_cells(sampled, every, [sampled["ratio"][kind] for kind in _TIMES]), *[""] * 3],
        ["", *_cells(line, "all", [line["ratio"][kind] for kind in _TIMES]), *last],
    ]


def _cells(figures: dict[str, Any], recorded: str, ratios: Sequence[dict[str, Any]]) -> list[str]:
    shown = ["{median:.4f} ({interval[0]:.3f}-{interval[1]:.3f})".format(**ratio) for ratio in ratios]
    return [f"{figures['step_ms']['off']['median']:.1f}", recorded, *shown]


def console_table(result: dict[str, Any]) -> Any:
    """The table for a terminal; needs rich."""
    from syncline.report.tables import simple_table

    title = f"recorder: {result['setting']['model']}, {result['tensors']} tensors, {result['setting']['device']}"
    return simple_table(title, *table(result), fold=True)
