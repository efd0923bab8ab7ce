"""`syncline train`: train a model with one synchronisation strategy."""

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.errors import UsageError

app = new_app()


@app.command()
def train(
    strategy: Annotated[str | None, typer.Option(help="ddp, ring, server(servers=2) ... (default: ddp)")] = None,
    model: session.Model = None,
    data: session.Data = None,
    nproc: session.Nproc = None,
    nodes: session.Nodes = None,
    bandwidth: session.Bandwidth = None,
    steps: session.Steps = None,
    epochs: session.Epochs = None,
    batch: session.Batch = None,
    seed: session.Seed = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, for --resume; one more is written at the end.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder, from its newest checkpoint or the one named.")
    ] = None,
    out: session.Out = None,
    as_json: session.Json = False,
    recipe: session.Recipe = None,
    settings: session.Set = None,
    trust_files: session.Trust = False,
) -> None:
    """Train a model with one synchronisation strategy. Under torchrun the same command is one of the ranks."""
    options = locals()
    if resume is not None and out is not None:
        raise UsageError("--resume continues in the run's own folder: leave --out out")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise UsageError(f"--checkpoint-every must be at least 1, not {checkpoint_every}")
    session.refuse_settings(settings, ("compare.scale", "compare.scale_batch"), "use compare for several world sizes")
    if strategy is not None or (resume is None and not session.is_set(settings, "compare.strategies")):
        options["strategies"] = ["ddp" if strategy is None else strategy]
    config = session.resolve(options).override({"compare.scale": []})
    if len(config.compare.strategies) != 1:
        raise UsageError("train takes one strategy: use compare for several")
    raise typer.Exit(session.execute(config, out=out, as_json=as_json, resume=resume))
