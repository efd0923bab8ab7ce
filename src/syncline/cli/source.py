"""What `plan` and `simulate` start from: a recorded run and its network, the network and codecs in question."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from syncline.cluster.quantities import format_bandwidth, parse_bandwidth
from syncline.engine.tuning.tuner import allowed_codecs
from syncline.errors import UsageError
from syncline.plan.costs import Costs
from syncline.plan.planner import ALWAYS as ALWAYS
from syncline.plan.planner import Choice
from syncline.plan.predict import built
from syncline.plan.recorded import COSTS, Recorded, load_recorded
from syncline.plan.table import Plan
from syncline.plan.whatif import Setting, outcome, recorded
from syncline.results import file as results_file
from syncline.results.file import numbers

PAYLOAD = 0.95
"""The share of a link's bits that is payload, where no recorded link says it."""
_FEWEST = 3
_FIX = "run syncline train --strategy 'syncline(auto)' first"


@dataclass(frozen=True)
class Source:
    """A recorded run. Without its `results.json`, neither its network nor its step is known."""

    folder: Path
    run: Recorded
    bandwidth: int | None = None
    per_node: int = 1
    measured_ms: float | None = None
    steps: int = 0

    @property
    def tree(self) -> bool:
        """NCCL passes small messages along trees, Gloo around a ring."""
        return self.run.device == "cuda"


def find(path: Path) -> Source:
    """The measured run behind a run folder, a strategy's folder in it, or a `costs.json`."""
    folder = _folder(path)
    run = load_recorded(folder)
    top = folder.parent.parent if folder.absolute().parent.name == "runs" else folder
    if not (top / results_file.FILE_NAME).is_file():
        return Source(folder, run)
    results = results_file.load(top)
    network = results["network"]
    row: Any = next(
        (r for r in results["runs"] if r["strategy"] == run.strategy and r["world_size"] == run.costs.world), None
    )
    if row is None or not results_file.ok(row):
        return Source(folder, run, network["bandwidth"])
    # The first step under the plan still warms up.
    steady = numbers(row["step_ms_series"][run.planned_at + 1 :])
    per_node = max(1, run.costs.world // row["nodes"]) if network["emulated"] else 1
    measured = median(steady) if len(steady) >= _FEWEST else None
    # The link that the costs are of is that of the last plan.
    changed = [c["bandwidth"] for c in row.get("link_changes") or () if c["step"] <= run.planned_at]
    return Source(folder, run, changed[-1] if changed else network["bandwidth"], per_node, measured, len(steady))


def setting(source: Source, *, nodes: int | None, bandwidth: str | int | None) -> Setting:
    """The network that is asked about; what is not asked is as it was recorded."""
    costs = source.run.costs
    if nodes is not None and nodes < 2:
        raise UsageError(f"--nodes must be at least 2, not {nodes}")
    ranks = costs.world if nodes is None else nodes * source.per_node
    rate = costs.link.bytes_per_s
    if bandwidth is not None:
        bits = parse_bandwidth(bandwidth)
        rate = rate * bits / source.bandwidth if source.bandwidth else bits / 8 * PAYLOAD
    return Setting(ranks, rate, source.tree)


def wanted(compress: str | None, costs: Costs) -> tuple[list[str], str | None]:
    """The codecs to choose from, and the one to plan with if the spec names one."""
    lossy = [name for name in costs.specs if name not in ALWAYS]
    if compress is None or compress.strip() == "auto":
        return lossy, None
    named = allowed_codecs(compress)
    only = None if named is not None else built(compress).text
    names = [built(name).text for name in (named if named is not None else [compress])]
    measured = {built(name).text for name in costs.specs}
    for name in names:
        if name not in measured:
            raise UsageError(
                f"'{name}' was not measured in that run, only {', '.join(sorted(measured))}: run syncline train"
                f" --strategy 'syncline(auto({name}))' first"
            )
    return [name for name in names if name not in ALWAYS], only


def replay(source: Source) -> dict[str, Any]:
    """The recorded plan predicted on the recorded network, beside what was measured."""
    run = source.run
    told = outcome(run.plan, run.shapes, run.costs, recorded(run.costs, tree=source.tree)).step * 1e3
    error = None if source.measured_ms is None else told / source.measured_ms - 1
    return {"predicted_ms": told, "measured_ms": source.measured_ms, "steps": source.steps, "error": error}


def replay_text(told: dict[str, Any]) -> str:
    """The replay's error in a line."""
    if told["error"] is None:
        return (
            f"replay: the recorded plan is predicted at {told['predicted_ms']:.1f} ms; its error is not known: there"
            f" are {told['steps']} measured steps after planning ({_FEWEST} are needed)"
        )
    return (
        f"replay: the recorded plan is predicted at {told['predicted_ms']:.1f} ms, measured"
        f" {told['measured_ms']:.1f} ms (median of {told['steps']} steps): error {told['error']:+.1%}"
    )


def network_facts(source: Source, where: Setting, bandwidth: str | None) -> dict[str, Any]:
    """The network in question, for JSON."""
    bits = source.bandwidth if bandwidth is None else parse_bandwidth(bandwidth)
    rate = where.bytes_per_s if where.bytes_per_s < float("inf") else None
    return {"ranks": where.ranks, "nodes": where.ranks // source.per_node, "bandwidth": bits, "bytes_per_s": rate}


def network_text(facts: dict[str, Any]) -> str:
    """The network in question, for a person."""
    link = "links as measured" if facts["bandwidth"] is None else f"links of {format_bandwidth(facts['bandwidth'])}/s"
    ranks = "" if facts["ranks"] == facts["nodes"] else f" with {facts['ranks']} ranks"
    return f"{facts['nodes']} nodes{ranks}, {link}"


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    units = {unit.name: unit for unit in plan.units}
    return {
        "hash": plan.hash,
        "units": [
            {"name": u.name, "parameters": list(u.parameters), "codec": u.codec, "exchange": u.exchange,
             "partitions": u.partitions}
            for u in plan.units
        ],
        "order": [units[name].label(part) for name, part in plan.order],
    }  # fmt: skip


def alternatives(choice: Choice) -> list[dict[str, Any]]:
    """What was weighed, fastest first."""
    rows = sorted(choice.alternatives, key=lambda weighed: weighed.step)
    return [{"name": w.name, "predicted_ms": w.step * 1e3, "launches": len(w.plan.order)} for w in rows]


def alternatives_text(choice: Choice) -> str:
    """What was weighed, as aligned lines; a star marks the choice."""
    rows = alternatives(choice)
    width = max(len(row["name"]) for row in rows)
    chosen = choice.plan.about.get("chosen")
    return "\n".join(
        f"{'*' if row['name'] == chosen else ' '} {row['name'].ljust(width)}  {row['predicted_ms']:10.1f} ms"
        f"  {row['launches']:4d} launches"
        for row in rows
    )


def _folder(path: Path) -> Path:
    if path.is_file():
        if path.name != COSTS:
            raise UsageError(f"--from {path}: name a run folder or its {COSTS}; if there is none, {_FIX}")
        return path.parent
    if not path.is_dir():
        raise UsageError(f"there is no '{path}': name a run folder; to make one, {_FIX}")
    if (path / COSTS).is_file():
        return path
    found = sorted(file.parent for file in path.glob(f"runs/*/{COSTS}"))
    if not found:
        raise UsageError(f"{path} holds no cost curves: {_FIX}")
    if len(found) > 1:
        raise UsageError(f"{path} holds several measured runs: name one, such as --from {found[0]}")
    return found[0]
