"""`syncline plan`: the plan for a job, from a short training or from what a run has measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from syncline.cli import options as o
from syncline.cli.execute import print_json
from syncline.errors import UsageError

if TYPE_CHECKING:
    from syncline.train.config import Config

STEPS = 12
"""Of the short training: warm-up and profile, then some under the plan, to hold the prediction against."""


def plan(
    model: o.Model = None,
    data: o.Data = None,
    nproc: o.Nproc = None,
    nodes: o.Nodes = None,
    bandwidth: o.Bandwidth = None,
    batch: o.Batch = None,
    seed: o.Seed = None,
    compress: Annotated[
        str | None, typer.Option(help="auto, auto(int8, powersgd(rank=4)), or one codec for all gradients.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Plan from a run's costs; --nodes and --bandwidth then ask what if."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan: a TOML file for attach(plan=...).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")] = False,
    recipe: o.Recipe = None,
    settings: o.Set = None,
) -> None:
    """Find the plan of a job on a network: its table, what was weighed, what each would take, and why."""
    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a folder: name a file in it, such as {out / 'plan.toml'}")
    job: dict[str, Any] = {"model": model, "data": data, "nproc": nproc, "batch": batch, "seed": seed}
    if source is not None:
        given = {**job, "recipe": recipe, "set": settings}
        if odd := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"--from takes the recorded job: leave --{odd[0]} out")
        _answer(source, nodes, bandwidth, compress, out, as_json=as_json)
        return
    config = o.resolve(recipe, settings, nodes=nodes, bandwidth=bandwidth, **job)
    measured = _measure(config, compress)
    if measured is not None:
        _answer(measured, None, None, compress, out, as_json=as_json)


class _Quiet:
    """A watcher that passes on what the user should know and nothing else."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def begin(self, run: Any) -> None:
        """Nothing to say."""

    def step(self, message: dict[str, Any]) -> None:
        """Nothing to say."""

    def end(self, run: Any, result: dict[str, Any]) -> None:
        """Nothing to say."""


def _measure(config: "Config", compress: str | None) -> Path | None:
    """Train some steps; the run folder, or None on a launcher's other ranks."""
    from syncline.train.session.torchrun import is_launched, run_launched

    launched = is_launched()
    if config.cluster.nodes and not launched:
        from syncline.cluster.capabilities import capabilities
        from syncline.cluster.privileges import ensure_privileges

        if capabilities().how == "userns":
            ensure_privileges(reexec=True)
    from syncline.engine.tuning.tuner import allowed_codecs
    from syncline.plan.planner import ALWAYS
    from syncline.plan.predict import built
    from syncline.train.session.session import run_session

    spec = compress or "auto"
    if allowed_codecs(spec) is None:
        text = built(spec).text
        spec = "auto" if text in ALWAYS else f"auto({text})"
    changes = {"train.steps": STEPS, "train.epochs": 1, "train.test_samples": 0, "train.checkpoint_every": 0}
    config = config.override({**changes, "compare.strategies": [f"syncline({spec})"], "compare.scale": []})
    watch = _Quiet(Console(stderr=True))
    done = (run_launched if launched else run_session)(config, out=None, watcher=watch)
    if done is None:
        return None
    folder, results = done
    if results["runs"][0]["status"] == "crashed":
        failure = results["runs"][0]["error"]
        assert failure is not None
        watch.note(f"the training crashed on rank {failure['rank']}: {failure['summary']} (logs: {folder})")
        raise typer.Exit(1)
    return folder


def _answer(
    path: Path, nodes: int | None, bandwidth: str | None, compress: str | None, out: Path | None, *, as_json: bool
) -> None:
    from syncline.cli import source as s
    from syncline.plan.file import save
    from syncline.plan.whatif import choose, outcome

    found = s.find(path)
    run = found.run
    where = s.setting(found, nodes=nodes, bandwidth=bandwidth)
    allowed, only = s.wanted(compress, run.costs)
    choice = choose(run.shapes, run.costs, where, allowed=allowed, only=only)
    told = outcome(choice.plan, run.shapes, run.costs, where)
    replayed, network = s.replay(found), s.network_facts(found, where, bandwidth)
    if out is not None:
        save(choice.plan, out)
    if as_json:
        print_json(
            {
                "plan": s.plan_facts(choice.plan),
                "predicted_ms": choice.step * 1e3,
                "bound_ms": choice.bound * 1e3,
                "alternatives": s.alternatives(choice),
                "why": choice.why,
                "network": network,
                "replay": replayed,
                "from": str(found.folder),
            }
        )
        return
    bound = f"max(compute {told.compute * 1e3:.1f} ms, wire {told.wire * 1e3:.1f} ms)"
    lines = [
        choice.plan.table(),
        "",
        f"weighed for {s.network_text(network)}:",
        s.alternatives_text(choice),
        f"bound: {choice.bound * 1e3:.1f} ms = {bound}",
        f"why: {choice.why}",
        s.replay_text(replayed),
        f"measured in: {found.folder}",
    ]
    if out is not None:
        lines.append(f"saved: {out}; run with attach(plan=...) or --strategy 'syncline(file=\"{out}\")'")
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
