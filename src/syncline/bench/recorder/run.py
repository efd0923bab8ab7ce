"""`bench recorder`: what recording costs a step, and whether the partition accounts for the time that passed.

Two ranks on this machine train the same model under DDP and attached, with the recorder on and off in blocks that take
turns in the same processes; a ratio is of two blocks of one round. On means that every step is recorded, and then, in
blocks of n steps or more, each n-th as the recorder chooses by default: that is what the bound of 1% is for. The wall
time is read from the host's clock around each block, not from the recorder. Where a machine's noise is more than 1%,
recorded steps and their neighbours tell more, which take turns within one recording; what steps between pay is not in
that.
Also runnable where typer is not: `python -m syncline.bench.recorder.run --device cuda`.
"""

import argparse
import math
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from syncline.bench.codecs.run import table
from syncline.bench.overhead.rank import Setting
from syncline.bench.overhead.run import BATCH, started, write
from syncline.bench.recorder.rank import LEAD, run_rank, trace_file
from syncline.bench.timing import environment, summarize
from syncline.errors import RankFailure, UsageError
from syncline.trace.analysis.partition import partition
from syncline.trace.formats.chrome_read import reread
from syncline.train.session.run_folder import cores

WAYS = ("ddp", "syncline")
MOST, APART = 0.01, 0.01
"""What recording may add to a step, and how far the partition may be from the wall."""
HEADINGS = (
    "way", "step ms", "recorded", "on/off", "CPU on/off", "thread on/off", "counted", "spans", "partition off by",
)  # fmt: skip
_BUSY = 0.1
_FEW = 6
_TIMES = ("step", "cpu", "thread")


def setting(device: str, **asked: Any) -> Setting:
    """What to measure; `None` leaves a default."""
    given = {key: value for key, value in asked.items() if value is not None}
    own = {"batch": BATCH[device], "threads": max(1, cores() // given.get("ranks", Setting.ranks))}
    own |= {"blocks": 8, "steps": 8} if device == "cpu" else {"blocks": 5, "steps": 6}
    return Setting(device=device, ways=WAYS, **{**own, **given})


def measure(wanted: Setting, *, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Start the ranks and make a row of each way."""
    with started(run_rank, wanted, progress) as (records, folder, busy):
        rows = [row(name, records, _traces(wanted, str(folder), name)) for name in wanted.ways]
    result = {
        "environment": environment(torch.device(wanted.device))
        | {"python": platform.python_version(), "platform": platform.platform(), "cores": cores()}
        | {"threads": wanted.threads, "busy_before": round(busy, 3)},
        "command": shlex.join(["python", "-m", "syncline.bench.recorder.run", *_arguments(wanted)]),
        "setting": asdict(wanted),
        "tensors": records[0]["tensors"],
        "repetitions": f"{wanted.blocks} rounds of {wanted.steps} steps on and off, the mean of {wanted.ranks} ranks;"
        " sampled: see the rows",
        "bounds": {"ratio": 1 + MOST, "partition_error": APART},
        "warnings": [],
        "rows": rows,
    }
    if busy > _BUSY:
        result["warnings"].append(f"other programs took {busy:.0%} of this machine: preliminary figures")
    result["warnings"] += [text for line in rows for text in judged(line)]
    return result


def judged(line: dict[str, Any]) -> list[str]:
    """What of a way is beyond the bounds, or is not shown to be within them."""
    found, every = [], f"{line['way']}: recording one step in {line['sampled']['every']}"
    if line["sampled"]["ratio"]["step"]["median"] > 1 + MOST:
        found.append(f"{every} took more than {MOST:.0%} of the time, by blocks")
    if line["in_turn"]["default"]["interval"][1] > 1 + MOST:
        found.append(f"{every} is not shown to take less than {MOST:.0%} of the time, by steps")
    if not line["partition_error"]["worst"] <= APART:
        found.append(f"{line['way']}: the partition is more than {APART:.0%} from the wall time")
    return found


def row(name: str, records: Sequence[dict[str, Any]], traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A way's figures, every step recorded; under `sampled` those with as few as the recorder chooses by default."""
    mine = [record["ways"][name] for record in records]
    made: dict[str, Any] = {"way": name, **compared(mine, "on", "off")}
    sampled = {"every": mine[0]["every"], "steps": mine[0]["sampled_steps"], "rounds": len(mine[0]["sampled"]["step"])}
    made["sampled"] = sampled | compared(mine, "sampled", "sampled_off")
    made["in_turn"] = in_turn(mine, name, sampled["every"])
    counted = statistics.median(trace["recorder"]["overhead_ns_per_step"] for trace in traces) / 1e6
    made["counted_ms"] = counted
    made["counted_share"] = counted / made["step_ms"]["off"]["median"]
    made["spans_per_step"] = statistics.median(trace["recorder"]["spans_per_step"] for trace in traces)
    made["partition_error"] = _apart(mine, traces)
    return made


def compared(ranks: Sequence[dict[str, Any]], on: str, off: str) -> dict[str, Any]:
    """Medians and quartiles over the blocks, ratios of on to off by round.

    Ranks wait for each other, so a block is one sample: the mean of its ranks.
    """
    made: dict[str, Any] = {"ratio": {}}
    for kind in _TIMES:
        with_it, without = (
            [statistics.mean(values) for values in zip(*(rank[state][kind] for rank in ranks), strict=True)]
            for state in (on, off)
        )
        made[f"{kind}_ms"] = {"on": summarize(with_it).as_dict(), "off": summarize(without).as_dict()}
        made["ratio"][kind] = _paired(with_it, without)
    return made


def _paired(on: Sequence[float], off: Sequence[float]) -> dict[str, Any]:
    """Ratios of neighbours: median and quartiles, their interval, and what undisturbed ones come to."""
    pairs = [a / b for a, b in zip(on, off, strict=True)]
    return summarize(pairs).as_dict() | {"interval": interval(pairs), "floor": _floor(on) / _floor(off)}


def in_turn(ranks: Sequence[dict[str, Any]], name: str, every: int) -> dict[str, Any]:
    """What a recorded step takes of one that is not; and what that comes to by default, one in `every`."""
    on, off = (
        [statistics.mean(values) for values in zip(*(rank["in_turn"][kind] for rank in ranks), strict=True)]
        for kind in ("on", "off")
    )
    ratio = _paired(on, off)
    # An attached model is watched in the steps before and behind, too.
    share = min(1.0, (1 if name == "ddp" else 3) / every)
    default = {"share": share, "ratio": 1 + share * (ratio["median"] - 1)}
    default["interval"] = [1 + share * (end - 1) for end in ratio["interval"]]
    times = {"on": summarize(on).as_dict(), "off": summarize(off).as_dict()}
    return {"step_ms": times, "ratio": ratio, "default": default}


def interval(samples: Sequence[float]) -> list[float]:
    """The values between which the true median lies in about 19 of 20 cases, by the ranks of the samples alone (by a
    normal distribution of ranks: 92% to 95% of up to 25 samples); of fewer than six samples, all of them.

    >>> interval(range(100))
    [40, 59]
    """
    if len(samples) < _FEW:
        return [min(samples), max(samples)]
    reach = 1.96 * math.sqrt(len(samples)) / 2
    first = max(0, math.ceil(len(samples) / 2 - reach) - 1)
    ordered = sorted(samples)
    return [ordered[first], ordered[len(ordered) - 1 - first]]


def _floor(samples: Sequence[float]) -> float:
    """What a block takes when nobody disturbs it: the mean of the fastest tenth."""
    fastest = sorted(samples)[: max(1, len(samples) // 10)]
    return sum(fastest) / len(fastest)


def _apart(mine: Sequence[dict[str, Any]], traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far a block's phases, summed, are from its wall time, for every rank: the worst block, and the median."""
    ranks = {}
    for rank, record in enumerate(mine):
        sums = [trace["ms"].get(rank, math.nan) for trace in traces]
        errors = [abs(total / wall - 1) for total, wall in zip(sums, record["on"]["step"], strict=True)]
        ranks[str(rank)] = {"worst": max(errors), "median": statistics.median(errors)}
    return {"worst": max(entry["worst"] for entry in ranks.values()), "ranks": ranks}


def _traces(wanted: Setting, folder: str, name: str) -> list[dict[str, Any]]:
    """Of each block's trace, by rank, the phases of all counted steps in milliseconds a step."""
    found = []
    for number in range(wanted.blocks):
        again = reread(trace_file(folder, name, number))
        sums = {}
        for rank in range(wanted.ranks):
            steps = partition(s for s in again.spans if s.rank == rank)
            counted = [sum(phases.values()) for step, phases in steps.items() if step >= LEAD[wanted.device]]
            if len(counted) == wanted.steps:
                sums[rank] = sum(counted) / len(counted) / 1e6
        found.append({"recorder": again.metadata["recorder"], "ms": sums})
    return found


def cells(line: dict[str, Any]) -> list[list[str]]:
    """A way as four rows of text: medians with their 95% intervals."""
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


def rich_table(result: dict[str, Any]) -> Any:
    """The table for a terminal; needs rich."""
    from rich.table import Table

    title = f"recorder: {result['setting']['model']}, {result['tensors']} tensors, {result['setting']['device']}"
    out = Table(title=title, box=None, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        out.add_column(heading, justify="right" if number else "left", overflow="fold")
    for line in result["rows"]:
        for texts in cells(line):
            out.add_row(*texts)
    return out


def _arguments(wanted: Setting) -> list[str]:
    given = {"device": wanted.device, "model": wanted.model, "data": wanted.data, "batch": wanted.batch}
    given |= {"ranks": wanted.ranks, "blocks": wanted.blocks, "steps": wanted.steps, "warm-up": wanted.warm_up}
    given |= {"threads": wanted.threads, "seed": wanted.seed}
    return [f"--{key}={value}" for key, value in given.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.recorder.run", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="JSON file")
    for name in ("model", "data"):
        parser.add_argument(f"--{name}", help=f"default: {getattr(Setting, name)}")
    for name in ("batch", "ranks", "blocks", "steps", "warm-up", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int)
    options = vars(parser.parse_args(arguments))
    out, device = options.pop("out"), options.pop("device")
    try:
        result = measure(setting(device, **options), progress=lambda text: print(text, file=sys.stderr))
    except UsageError as error:
        parser.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    print(table(list(HEADINGS), [texts for line in result["rows"] for texts in cells(line)]))
    print("\n".join(result["warnings"]))
    if out is not None:
        write(result, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
