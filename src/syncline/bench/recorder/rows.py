"""Rows and table of `bench recorder`, from the records of the ranks and their traces."""

import math
from collections.abc import Sequence
from typing import Any

from syncline.bench.output import rich_table
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
        made[f"{kind}_ms"] = {"on": summarize(recorded).as_dict(), "off": summarize(plain).as_dict()}
        made["ratio"][kind] = _paired(recorded, plain)
    return made


def _paired(on: Sequence[float], off: Sequence[float]) -> dict[str, Any]:
    """Ratios of neighbours: median, quartiles, confidence interval of the median, and ratio of the fastest tenths."""
    pairs = ratios(on, off)
    interval = list(median_interval(pairs))
    return summarize(pairs).as_dict() | {"interval": interval, "floor": _floor(on) / _floor(off)}


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
    times = {"on": summarize(on).as_dict(), "off": summarize(off).as_dict()}
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


def cells(line: dict[str, Any]) -> list[list[str]]:
    """The four lines of a way: medians with their 95% intervals."""
    sampled = line["sampled"]
    counted = [f"{line['counted_share']:.3%}", f"{line['spans_per_step']:.0f}"]
    turns = line["in_turn"]
    ratios = [turns["ratio"], {"median": turns["default"]["ratio"], "interval": turns["default"]["interval"]}]
    steps = f"{turns['step_ms']['off']['median']:.1f}"
    return [
        [line["way"], steps, f"1 in {sampled['every']}, by steps", _ratio(ratios[1]), "", "", "", "", ""],
        ["", steps, "in turn", _ratio(ratios[0]), "", "", "", "", ""],
        [*_compared_cells("", sampled, f"1 in {sampled['every']}"), "", "", ""],
        [*_compared_cells("", line, "all"), *counted, f"{line['partition_error']['worst']:.2%}"],
    ]


def _compared_cells(name: str, figures: dict[str, Any], recorded: str) -> list[str]:
    texts = [name, f"{figures['step_ms']['off']['median']:.1f}", recorded]
    for kind in _TIMES:
        texts.append(_ratio(figures["ratio"][kind]))
    return texts


def _ratio(figures: dict[str, Any]) -> str:
    low, high = figures["interval"]
    return f"{figures['median']:.4f} ({low:.3f}-{high:.3f})"


def lines(result: dict[str, Any]) -> list[list[str]]:
    """All lines of the table."""
    return [texts for line in result["rows"] for texts in cells(line)]


def console_table(result: dict[str, Any]) -> Any:
    """The table for a terminal; needs rich."""
    title = f"recorder: {result['setting']['model']}, {result['tensors']} tensors, {result['setting']['device']}"
    return rich_table(title, HEADINGS, lines(result))
