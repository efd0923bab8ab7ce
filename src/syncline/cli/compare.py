"""`syncline compare`: the same training under every strategy, side by side."""

from typing import Annotated

import typer

from syncline.cli import options as o
from syncline.cli.execute import execute


def compare(
    strategies: Annotated[str | None, typer.Option(help="Comma list: single,all-reduce,ddp-powersgd(rank=4).")] = None,
    model: o.Model = None,
    data: o.Data = None,
    nproc: o.Nproc = None,
    nodes: o.Nodes = None,
    bandwidth: o.Bandwidth = None,
    steps: o.Steps = None,
    epochs: o.Epochs = None,
    batch: o.Batch = None,
    seed: o.Seed = None,
    scale: Annotated[str | None, typer.Option(help="World sizes: 1,2,4 runs each strategy at each of them.")] = None,
    out: o.Out = None,
    as_json: o.Json = False,
    recipe: o.Recipe = None,
    settings: o.Set = None,
) -> None:
    """Train the same model under several strategies and report what each costs and why.

    Under torchrun the same command is one of the ranks.
    """
    config = o.resolve(
        recipe,
        settings,
        strategies=strategies,
        model=model,
        data=data,
        nproc=nproc,
        nodes=nodes,
        bandwidth=bandwidth,
        steps=steps,
        epochs=epochs,
        batch=batch,
        seed=seed,
        scale=scale,
    )
    raise typer.Exit(execute(config, out=out, as_json=as_json))
