"""`syncline simulate --what`: questions that any trace answers, by a replay; and other codecs, from cost curves."""

from pathlib import Path
from typing import Any

from syncline.cluster.quantities import format_bandwidth
from syncline.errors import UsageError
from syncline.plan.recorded import COSTS
from syncline.report.figures import printable
from syncline.results import file as results_file
from syncline.sim.replay.what_if import QUESTIONS, Replay
from syncline.trace.analysis.startup import start_up
from syncline.trace.analysis.steps import prepare
from syncline.trace.formats.load import TRACE, find
from syncline.trace.merge.rank_file import has_parts

FORMAT = "syncline what-if 1"
USUAL = ("no-straggler", "infinite-network", "2x", "perfect-overlap")
"""What is asked where nothing is named."""
_CODEC = "codec="
_FIX = "run syncline train --strategy 'syncline(auto)' first"


def has_costs(path: Path) -> bool:
    """Whether there are cost curves, which questions on other networks and codecs need."""
    return path.name == COSTS or (path / COSTS).is_file() or any(path.glob(f"runs/*/{COSTS}"))


def has_trace(path: Path) -> bool:
    """Whether this can be a trace, or a folder with one."""
    if path.is_dir():
        files = [file for ending in ("json", "json.gz") for file in path.glob(f"*.{ending}")]
        return has_parts(path) or any(path.glob(f"runs/*/{TRACE}")) or any(has_trace(file) for file in files)
    return path.is_file() and path.name != results_file.FILE_NAME


def questions(text: str | None) -> list[str]:
    """The comma list, commas within brackets kept: `2x,codec=auto(int8, int4)`."""
    if text is None:
        return list(USUAL)
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            words.append("")
        else:
            words[-1] += letter
    asked = [word.strip() for word in words if word.strip()]
    if not asked:
        raise UsageError(f"--what is empty: name some of {', '.join((*QUESTIONS, '2x', f'{_CODEC}int8'))}")
    return list(dict.fromkeys(asked))


def answered(path: Path, what: str | None) -> tuple[dict[str, Any], str]:
    """What the trace behind a path says, as plain data and as text."""
    asked = questions(what)
    if path.name == COSTS:
        path = path.parent
    source = find(path)
    trace = prepare(source.spans)
    replay = Replay(source.spans, first=start_up(trace).first if trace.steps else 0)
    rows = [_codec(path, word) if word.startswith(_CODEC) else _row(replay, word) for word in asked]
    told: dict[str, Any] = {
        "format": FORMAT,
        "from": str(source.path),
        "strategy": source.metadata.get("strategy"),
        "world_size": replay.ranks,
        "steps": {"first": replay.counted[0], "last": replay.counted[-1], "count": len(replay.counted)},
        "step_ms": {"median": replay.measured.median, "mean": replay.measured.mean},
        "network": _network(replay),
        "replay": {
            "predicted_ms": replay.modelled.median,
            "measured_ms": replay.measured.median,
            "steps": len(replay.counted),
            "error": replay.error,
        },
        "answers": rows,
        "notes": [*source.notes, *replay.notes],
    }
    return told, printable(_text(told))


def _row(replay: Replay, what: str) -> dict[str, Any]:
    answer = replay.ask(what)
    return {
        "what": answer.what,
        "predicted_ms": answer.steps.median,
        "gain_ms": answer.gain_ms,
        "speedup": replay.same.median / answer.steps.median if answer.steps.median else None,
        "mean_ms": answer.steps.mean,
        "mean_gain_ms": replay.same.mean - answer.steps.mean,
        "by": "replay",
        "says": answer.says,
    }


def _codec(path: Path, what: str) -> dict[str, Any]:
    """Another codec on the recorded network: the planner's prediction, against that of the plan that ran."""
    from syncline.cli import source as s
    from syncline.plan.whatif import choose, outcome, recorded

    if not has_costs(path):
        raise UsageError(f"'{what}' needs cost curves, which {path} does not hold: {_FIX}, or leave it out")
    found = s.find(path)
    run = found.run
    where = recorded(run.costs, tree=found.tree)
    allowed, only = s.wanted(what.removeprefix(_CODEC), run.costs)
    choice = choose(run.shapes, run.costs, where, allowed=allowed, only=only)
    now = outcome(run.plan, run.shapes, run.costs, where).step * 1e3
    there = choice.step * 1e3
    return {
        "what": what,
        "predicted_ms": there,
        "gain_ms": now - there,
        "speedup": now / there if there else None,
        "mean_ms": None,
        "mean_gain_ms": None,
        "by": "cost curves",
        "says": f"the planner's best with {choice.plan.about['chosen']}; predicted for the plan that ran: {now:.1f} ms",
    }


def _network(replay: Replay) -> dict[str, float | None] | None:
    if not any(work.lane == "exchange" and work.bytes for work in replay.graph.work):
        return None
    rate = replay.network.bytes_per_s * 1e9
    return {"latency_ms": replay.network.latency / 1e6, "bytes_per_s": rate if rate < float("inf") else None}


def _text(told: dict[str, Any]) -> str:
    names = [row["what"] for row in told["answers"]]
    width = max(len("as it was"), *map(len, names))
    head = f"{told['strategy'] or 'a trace'}, {told['world_size']} ranks, steps {told['steps']['first']}"
    head += f" to {told['steps']['last']}"
    lines = [f"note: {text}" for text in told["notes"]]
    lines += [f"{head} (times are medians)", f"{'as it was'.ljust(width)}  {told['step_ms']['median']:10.1f} ms"]
    for row in told["answers"]:
        gain = f"{-row['gain_ms']:+.1f}"
        lines.append(f"{row['what'].ljust(width)}  {row['predicted_ms']:10.1f} ms  {gain:>8}  {row['says']}")
    again = told["replay"]
    network = told["network"]
    by = "its own transfers"
    if network is not None:
        rate = (
            "without limit" if network["bytes_per_s"] is None else f"{format_bandwidth(network['bytes_per_s'] * 8)}/s"
        )
        by = f"transfers of {network['latency_ms']:.2g} ms + bytes at {rate}"
    lines.append(
        f"replay: with {by} the run is predicted at {again['predicted_ms']:.1f} ms, measured"
        f" {again['measured_ms']:.1f} ms (median of {again['steps']} steps): error {again['error']:+.1%}"
    )
    return "\n".join(lines)
