"""`syncline train`: train a model with one synchronisation strategy."""

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.cli.status import Quiet
from syncline.errors import UsageError
from syncline.train.config import load_recipe

app = new_app()


@app.command()
def train(
    strategy: Annotated[
        str | None, typer.Option(help="ddp, ring, server(servers=2) ... (default: ddp, with --freeze syncline)")
    ] = None,
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
    start: Annotated[
        str | None, typer.Option(help="Start with the parameters of this run folder or checkpoint (fine-tuning).")
    ] = None,
    freeze: Annotated[
        str | None,
        typer.Option(help="Freeze the model's first blocks, epoch by epoch: 'schedule(alpha=0.3)', none ..."),
    ] = None,
    pipe: Annotated[int | None, typer.Option(help="Stages of a pipeline; 1: none, 0: the fastest.")] = None,
    dp: Annotated[
        bool | None, typer.Option("--dp/--no-dp", help="Fewer stages and more replicas as blocks freeze, if that pays.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Memory per node for activations of frozen blocks, such as 1GB; '' is none.")
    ] = None,
    log_every: Annotated[
        int | None,
        typer.Option(help="Steps between the log lines of every rank: times, samples/s, bytes synchronised."),
    ] = None,
    out: session.Out = None,
    as_json: session.Json = False,
    quiet: Quiet = False,
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
    if strategy is not None:
        options["strategies"] = [strategy]
    elif resume is None and not session.is_set(settings, "compare.strategies") and not _names_one_strategy(recipe):
        # torch's DDP cannot freeze, and has no pipeline.
        options["strategies"] = ["syncline" if freeze or cache or pipe not in (None, 1) else "ddp"]
    config = session.resolve(options).override({"compare.scale": []})
    if len(config.compare.strategies) != 1:
        raise UsageError("train takes one strategy: use compare for several")
    raise typer.Exit(session.execute(config, out=out, as_json=as_json, quiet=quiet, resume=resume))


def _names_one_strategy(recipe: str | None) -> bool:
    """Whether a recipe is for one strategy; others are for `compare`."""
    return recipe is not None and len(load_recipe(recipe).compare.strategies) == 1
