"""`syncline simulate --what`: answers from replaying a trace, and for other codecs from cost curves."""

from pathlib import Path
from typing import Any

from syncline.cli.recorded_run import FIX, find_run, has_costs
from syncline.cluster.quantities import format_bandwidth
from syncline.errors import UsageError
from syncline.plan.run_files import COSTS
from syncline.results import file as results_file
from syncline.sim.replay.what_if import QUESTIONS, Replay
from syncline.spec import split
from syncline.trace.analysis.startup import start_up
from syncline.trace.analysis.steps import prepare
from syncline.trace.formats.load import TRACE, load
from syncline.trace.merge.rank_file import has_rank_files

FORMAT = "syncline what-if 1"
DEFAULT_QUESTIONS = ("no-straggler", "infinite-network", "2x", "perfect-overlap")
_CODEC = "codec="


def has_trace(path: Path) -> bool:
    """Whether this can be a trace, or a folder with one."""
    if path.is_dir():
        files = [file for ending in ("json", "json.gz") for file in path.glob(f"*.{ending}")]
        return has_rank_files(path) or any(path.glob(f"runs/*/{TRACE}")) or any(has_trace(file) for file in files)
    return path.is_file() and path.name != results_file.FILE_NAME


def answers(path: Path, what: str | None) -> dict[str, Any]:
    """The answers of the trace behind a path, as plain data."""
    questions = _questions(what)
    if path.name == COSTS:
        path = path.parent
    source = load(path)
    trace = prepare(source)
    replay = Replay(source, first=start_up(trace).first if trace.steps else 0)
    rows = [_other_codec(path, word) if word.startswith(_CODEC) else _replayed(replay, word) for word in questions]
    return {
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


def text(facts: dict[str, Any]) -> str:
    """The answers as text: one line each, and the error of replaying the run unchanged."""
    width = max(len("as it was"), *(len(row["what"]) for row in facts["answers"]))
    head = f"{facts['strategy'] or 'a trace'}, {facts['world_size']} ranks, steps {facts['steps']['first']}"
    head += f" to {facts['steps']['last']}"
    lines = [f"note: {text}" for text in facts["notes"]]
    lines += [f"{head} (times are medians)", f"{'as it was'.ljust(width)}  {facts['step_ms']['median']:10.1f} ms"]
    for row in facts["answers"]:
        gain = f"{-row['gain_ms']:+.1f}"
        lines.append(f"{row['what'].ljust(width)}  {row['predicted_ms']:10.1f} ms  {gain:>8}  {row['says']}")
    replay, network = facts["replay"], facts["network"]
    transfers = "its own transfers"
    if network is not None:
        rate = "no limit"
        if network["bytes_per_s"] is not None:
            rate = f"{format_bandwidth(network['bytes_per_s'] * 8)}/s"
        transfers = f"transfers of {network['latency_ms']:.2g} ms + bytes at {rate}"
    lines.append(
        f"replay: with {transfers} the run is predicted at {replay['predicted_ms']:.1f} ms, measured"
        f" {replay['measured_ms']:.1f} ms (median of {replay['steps']} steps): error {replay['error']:+.1%}"
    )
    return "\n".join(lines)


def _questions(what: str | None) -> list[str]:
    """The questions of a comma-separated list: `2x,codec=auto(int8, int4)`."""
    if what is None:
        return list(DEFAULT_QUESTIONS)
    asked = split(what)
    if not asked:
        raise UsageError(f"--what is empty: name some of {', '.join((*QUESTIONS, '2x', f'{_CODEC}int8'))}")
    return list(dict.fromkeys(asked))


def _replayed(replay: Replay, what: str) -> dict[str, Any]:
    answer = replay.ask(what)
    means = {"mean_ms": answer.steps.mean, "mean_gain_ms": replay.same.mean - answer.steps.mean}
    return _answer(answer.what, replay.same.median, answer.steps.median, means, by="replay", says=answer.says)


def _other_codec(path: Path, what: str) -> dict[str, Any]:
    """Another codec on the recorded network: the planner's prediction against that for the plan that ran."""
    if not has_costs(path):
        raise UsageError(f"'{what}' needs cost curves, which {path} does not hold: {FIX}, or leave it out")
    found = find_run(path)
    choice = found.best_plan(found.own_network, what.removeprefix(_CODEC))
    now = found.step_ms(found.record.plan, found.own_network)
    says = f"the planner's best with {choice.plan.about['chosen']}; predicted for the plan that ran: {now:.1f} ms"
    return _answer(what, now, choice.step * 1e3, {"mean_ms": None, "mean_gain_ms": None}, by="cost curves", says=says)


def _answer(what: str, now: float, predicted: float, means: dict[str, Any], **source: str) -> dict[str, Any]:
    """An answer as plain data; `now` is the prediction for the run as it was."""
    speedup = now / predicted if predicted else None
    return {"what": what, "predicted_ms": predicted, "gain_ms": now - predicted, "speedup": speedup, **means, **source}


def _network(replay: Replay) -> dict[str, float | None] | None:
    if not any(work.lane == "exchange" and work.bytes for work in replay.graph.work):
        return None
    rate = replay.network.bytes_per_s * 1e9
    return {"latency_ms": replay.network.latency / 1e6, "bytes_per_s": rate if rate < float("inf") else None}
