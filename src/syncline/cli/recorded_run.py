"""A recorded run for `plan` and `simulate`: its costs, its network, and predictions for other networks and codecs."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from syncline.cluster.quantities import format_bandwidth, parse_bandwidth
from syncline.errors import UsageError
from syncline.plan.auto_spec import parse_auto
from syncline.plan.other_network import TargetNetwork, choose, outcome, recorded
from syncline.plan.planner import ALWAYS, Choice
from syncline.plan.predict import built
from syncline.plan.run_files import COSTS, Recorded, load_recorded
from syncline.plan.table import Plan
from syncline.report.figures import text_table
from syncline.results import file as results_file
from syncline.results.file import numbers

PAYLOAD = 0.95
"""The assumed share of payload in a link's bits, if the bandwidth of the recorded link is unknown."""
MOST_NODES = 100_000
"""The largest network that is predicted: the bytes of every rank are counted."""
FIX = "run syncline train --strategy 'syncline(auto, tune=full)' first"
"""How to make a run with costs."""
_FEWEST_STEPS = 3


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run. Without its `results.json`, its network and its measured step are unknown."""

    folder: Path
    record: Recorded
    bandwidth: int | None = None
    per_node: int = 1
    measured_ms: float | None = None
    steps: int = 0

    @property
    def own_network(self) -> TargetNetwork:
        """The network of the recording."""
        return recorded(self.record.costs, tree=self._tree)

    @property
    def _tree(self) -> bool:
        """NCCL passes small messages along trees, Gloo around a ring."""
        return self.record.device == "cuda"

    def network(self, *, nodes: int | None, bandwidth: str | None) -> TargetNetwork:
        """The recorded network, with another number of nodes or another bandwidth."""
        costs = self.record.costs
        if nodes is not None and nodes < 2:
            raise UsageError(f"--nodes must be at least 2, not {nodes}")
        if nodes is not None and nodes > MOST_NODES:
            raise UsageError(f"--nodes must be at most {MOST_NODES}, not {nodes}")
        ranks = costs.world if nodes is None else nodes * self.per_node
        rate = costs.link.bytes_per_s
        if bandwidth is not None:
            bits = parse_bandwidth(bandwidth)
            rate = rate * bits / self.bandwidth if self.bandwidth else bits / 8 * PAYLOAD
        return TargetNetwork(ranks, rate, self._tree)

    def network_facts(self, network: TargetNetwork, bandwidth: str | None) -> dict[str, Any]:
        """A network as plain data."""
        bits = self.bandwidth if bandwidth is None else parse_bandwidth(bandwidth)
        rate = network.bytes_per_s if network.bytes_per_s < float("inf") else None
        return {"ranks": network.ranks, "nodes": network.ranks // self.per_node, "bandwidth": bits, "bytes_per_s": rate}

    def codecs(self, compress: str | None) -> tuple[list[str], str | None]:
        """The codecs to choose from, and the only one to use if `compress` names a single codec."""
        measured = self.record.costs.specs
        compress = compress or "auto"
        auto = parse_auto(compress)
        if auto is not None and not auto.listed:
            return [name for name in measured if name not in ALWAYS], None
        names = [built(name).text for name in (auto.codecs if auto is not None else [compress])]
        known = {built(name).text for name in measured}
        for name in names:
            if name not in known:
                raise UsageError(
                    f"'{name}' was not measured in that run, only {', '.join(sorted(known))}: run syncline train"
                    f" --strategy 'syncline(auto({name}))' first"
                )
        return [name for name in names if name not in ALWAYS], names[0] if auto is None else None

    def best_plan(self, network: TargetNetwork, compress: str | None) -> Choice:
        """The planner's choice on a network, among the codecs of `compress`."""
        allowed, only = self.codecs(compress)
        auto, record = parse_auto(compress or "auto"), self.record
        budget = replace(record.budget, error=auto.budget.error, unit=0.0) if auto and auto.asked else record.budget
        return choose(
            record.shapes, record.costs, network, allowed=allowed, only=only, errors=record.errors, budget=budget
        )

    def step_ms(self, plan: Plan, network: TargetNetwork) -> float:
        """The predicted step of a plan on a network."""
        return outcome(plan, self.record.shapes, self.record.costs, network).step * 1e3

    def replay(self) -> dict[str, Any]:
        """The predicted step of the recorded plan on the recorded network, beside the measured step."""
        predicted = self.step_ms(self.record.plan, self.own_network)
        error = None if self.measured_ms is None else predicted / self.measured_ms - 1
        return {"predicted_ms": predicted, "measured_ms": self.measured_ms, "steps": self.steps, "error": error}


def has_costs(path: Path) -> bool:
    """Whether a path leads to a `costs.json`, which predictions for other networks and codecs need."""
    return path.name == COSTS or (path / COSTS).is_file() or any(path.glob(f"runs/*/{COSTS}"))


def find_run(path: Path) -> RecordedRun:
    """The measured run behind a run folder, a strategy's folder in it, or a `costs.json`."""
    folder = _folder(path)
    record = load_recorded(folder)
    top = folder.parent.parent if folder.absolute().parent.name == "runs" else folder
    if not (top / results_file.FILE_NAME).is_file():
        return RecordedRun(folder, record)
    results = results_file.load(top)
    network = results["network"]
    row: Any = next(
        (r for r in results["runs"] if r["strategy"] == record.strategy and r["world_size"] == record.costs.world), None
    )
    if row is None or not results_file.ok(row):
        return RecordedRun(folder, record, network["bandwidth"])
    # The first step with the plan still warms up.
    steady = numbers(row["step_ms_series"][record.planned_at + 1 :])
    per_node = max(1, record.costs.world // row["nodes"]) if network["emulated"] else record.costs.node
    measured = median(steady) if len(steady) >= _FEWEST_STEPS else None
    # The costs belong to the link at the time of the last plan.
    changed = [c["bandwidth"] for c in row.get("link_changes") or () if c["step"] <= record.planned_at]
    bandwidth = changed[-1] if changed else network["bandwidth"]
    return RecordedRun(folder, record, bandwidth, per_node, measured, len(steady))


def replay_text(replay: dict[str, Any]) -> str:
    """The error of the replay as one line."""
    start = f"replay: the recorded plan is predicted at {replay['predicted_ms']:.1f} ms"
    steps = f"{replay['steps']} steps"
    if replay["error"] is None:
        return f"{start}; its error is not known: {steps} were measured after planning, {_FEWEST_STEPS} are needed"
    return f"{start}, measured {replay['measured_ms']:.1f} ms (median of {steps}): error {replay['error']:+.1%}"


def network_text(facts: dict[str, Any]) -> str:
    """A network as text."""
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
    """The alternatives that the planner compared, fastest first."""
    rows = sorted(choice.alternatives, key=lambda weighed: weighed.step)
    return [{"name": w.name, "predicted_ms": w.step * 1e3, "launches": len(w.plan.order)} for w in rows]


def alternatives_text(choice: Choice) -> str:
    """The alternatives as a table; a star marks the choice."""
    chosen = choice.plan.about.get("chosen")
    rows = [
        ("*" if row["name"] == chosen else "", row["name"], f"{row['predicted_ms']:.1f} ms", str(row["launches"]))
        for row in alternatives(choice)
    ]
    return text_table(("", "codecs", "step", "launches"), rows, left=(0, 1))


def frontier(choice: Choice) -> list[dict[str, Any]]:
    """Predicted step against error: the fastest plan inside each of several budgets."""
    return [
        {
            "limit": point.limit,
            "error": point.error,
            "predicted_ms": point.step * 1e3,
            "codecs": sorted({unit.codec for unit in point.plan.units}),
        }
        for point in choice.frontier
    ]


def frontier_text(choice: Choice) -> str:
    """The frontier as a table; a star marks the budget of the choice."""
    budget = choice.plan.about.get("error_budget")
    rows = [
        (
            "*" if row["limit"] == budget else "",
            f"{row['limit']:g}",
            f"{row['error']:.2g}",
            f"{row['predicted_ms']:.1f} ms",
            ", ".join(row["codecs"]),
        )
        for row in frontier(choice)
    ]
    return text_table(("", "error budget", "error", "step", "codecs"), rows, left=(0, 4))


def _folder(path: Path) -> Path:
    if path.is_file():
        if path.name != COSTS:
            raise UsageError(f"{path}: name a run folder or its {COSTS}; if there is none, {FIX}")
        return path.parent
    if not path.is_dir():
        raise UsageError(f"there is no '{path}': name a run folder; to make one, {FIX}")
    if (path / COSTS).is_file():
        return path
    found = sorted(file.parent for file in path.glob(f"runs/*/{COSTS}"))
    if not found:
        raise UsageError(f"{path} holds no cost curves: {FIX}")
    if len(found) > 1:
        raise UsageError(f"{path} holds several measured runs: name one, such as {found[0]}")
    return found[0]
