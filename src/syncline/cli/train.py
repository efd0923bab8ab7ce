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
    out: o.Out = None,
    as_json: o.Json = False,
    recipe: o.Recipe = None,
    settings: o.Set = None,
) -> None:
    """Train a model under one synchronisation strategy. Under torchrun the same command is one of the ranks."""
    config = o.resolve(
        recipe,
        settings,
        strategies=["ddp" if strategy is None else strategy],
        model=model,
        data=data,
        nproc=nproc,
        nodes=nodes,
        bandwidth=bandwidth,
        steps=steps,
        epochs=epochs,
        batch=batch,
        seed=seed,
    ).override({"compare.scale": []})
    if len(config.compare.strategies) != 1:
        raise UsageError("train takes one strategy: use compare for several")
    raise typer.Exit(execute(config, out=out, as_json=as_json))
