"""`syncline plan`: find the plan for a job, from a short training or from the costs of an earlier run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.cli.status import Quiet
from syncline.errors import UsageError
from syncline.train.config import Config

STEPS = 12
"""Steps of the short training: warm-up, profile, and some steps with the plan to check the prediction."""

_FIXED = {"train.steps": STEPS, "train.epochs": 1, "train.test_samples": 0, "train.checkpoint_every": 0}
_REPLACED = (*_FIXED, "compare.strategies", "compare.scale", "compare.scale_batch")

app = new_app()


@app.command()
def plan(
    run: Annotated[
        Path | None,
        typer.Argument(help="Plan from the costs of this run; --nodes and --bandwidth then describe another network."),
    ] = None,
    model: session.Model = None,
    data: session.Data = None,
    nproc: session.Nproc = None,
    nodes: session.Nodes = None,
    bandwidth: session.Bandwidth = None,
    batch: session.Batch = None,
    seed: session.Seed = None,
    compress: Annotated[
        str | None, typer.Option(help="auto, auto(error=0.1), auto(int8, powersgd(rank=4)), or one codec.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan as a TOML file, for attach(plan=...).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")] = False,
    quiet: Quiet = False,
    recipe: session.Recipe = None,
    settings: session.Set = None,
    trust_files: session.Trust = False,
) -> None:
    """Find the plan of a job on a network: its table, alternatives, predicted step against error, and the reason."""
    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a folder: name a file in it, such as {out / 'plan.toml'}")
    options = locals()
    if run is not None:
        job = {"model": model, "data": data, "nproc": nproc, "batch": batch, "seed": seed, "recipe": recipe}
        given = [name for name, value in {**job, "set": settings}.items() if value is not None]
        if given:
            raise UsageError(f"with a run, the job is the recorded one: leave --{given[0]} out")
        _answer(run, nodes, bandwidth, compress, out, as_json=as_json)
        return
    session.refuse_settings(settings, _REPLACED, f"syncline plan trains {STEPS} steps of its own")
    measured = _measure(session.resolve(options), compress, quiet=quiet)
    if measured is not None:
        _answer(measured, None, None, compress, out, as_json=as_json)


def _measure(config: Config, compress: str | None, *, quiet: bool) -> Path | None:
    """Train a few steps; returns the run folder, or None on every rank of a launcher but the first."""
    run = session.session_runner(config)
    from syncline.cli.progress import watcher
    from syncline.engine.attach import FULL
    from syncline.plan.auto_spec import parse_auto
    from syncline.plan.planner import ALWAYS
    from syncline.plan.predict import built

    spec = compress or "auto"
    if parse_auto(spec) is None:
        text = built(spec).text
        spec = "auto" if text in ALWAYS else f"auto({text})"
    config = config.override({**_FIXED, "compare.strategies": [f"syncline({spec}, tune={FULL})"], "compare.scale": []})
    watch = watcher(Console(stderr=True), quiet=quiet)
    try:
        done = run(config, out=None, watcher=watch)
    finally:
        watch.close()
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
    from syncline.cli import recorded_run as r
    from syncline.plan.file import save
    from syncline.plan.other_network import outcome

    found = r.find_run(path)
    where = found.network(nodes=nodes, bandwidth=bandwidth)
    choice = found.best_plan(where, compress)
    replay, network = found.replay(), found.network_facts(where, bandwidth)
    if out is not None:
        save(choice.plan, out)
    if as_json:
        print_json(
            {
                "plan": r.plan_facts(choice.plan),
                "predicted_ms": choice.step * 1e3,
                "bound_ms": choice.bound * 1e3,
                "alternatives": r.alternatives(choice),
                "frontier": r.frontier(choice),
                "why": choice.why,
                "network": network,
                "replay": replay,
                "from": str(found.folder),
            }
        )
        return
    predicted = outcome(choice.plan, found.record.shapes, found.record.costs, where)
    bound = f"max(compute {predicted.compute * 1e3:.1f} ms, network {predicted.wire * 1e3:.1f} ms)"
    lines = [
        choice.plan.table(),
        "",
        f"alternatives for {r.network_text(network)}:",
        r.alternatives_text(choice),
        *(["", "fastest step for each error budget:", r.frontier_text(choice), ""] if choice.frontier else []),
        f"bound: {choice.bound * 1e3:.1f} ms = {bound}",
        f"why: {choice.why}",
        r.replay_text(replay),
        f"measured in: {found.folder}",
    ]
    if out is not None:
        lines.append(f"saved: {out}; run with attach(plan=...) or --strategy 'syncline(file=\"{out}\")'")
    say("\n".join(lines))
