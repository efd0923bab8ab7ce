"""`syncline train`: one strategy."""

from typing import Annotated

import typer

from syncline.cli import options as o
from syncline.cli.execute import execute
from syncline.errors import UsageError


def train(
    strategy: Annotated[str | None, typer.Option(help="ddp, ring, server(servers=2) ... (default: ddp)")] = None,
    model: o.Model = None,
    data: o.Data = None,
    nproc: o.Nproc = None,
    nodes: o.Nodes = None,
    bandwidth: o.Bandwidth = None,
    steps: o.Steps = None,
    epochs: o.Epochs = None,
    batch: o.Batch = None,
    seed: o.Seed = None,
    checkpoint_every: o.CheckpointEvery = None,
    resume: o.Resume = None,
    out: o.Out = None,
    as_json: o.Json = False,
    recipe: o.Recipe = None,
    settings: o.Set = None,
) -> None:
    """Train a model under one synchronisation strategy. Under torchrun the same command is one of the ranks."""
    if resume is not None and out is not None:
        raise UsageError("--resume goes on in the run's own folder: leave --out out")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise UsageError(f"--checkpoint-every must be at least 1, not {checkpoint_every}")
    if strategy is None and resume is None:
        strategy = "ddp"
    config = o.resolve(
        recipe,
        settings,
        resume=resume,
        strategies=None if strategy is None else [strategy],
        model=model,
        data=data,
        nproc=nproc,
        nodes=nodes,
        bandwidth=bandwidth,
        steps=steps,
        epochs=epochs,
        batch=batch,
        seed=seed,
        checkpoint_every=checkpoint_every,
    ).override({"compare.scale": []})
    if len(config.compare.strategies) != 1:
        raise UsageError("train takes one strategy: use compare for several")
    raise typer.Exit(execute(config, out=out, as_json=as_json, resume=resume))
