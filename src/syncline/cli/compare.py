"""`syncline compare`: train the same model with several strategies, side by side."""

from typing import Annotated

import typer

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.cli.status import Quiet

app = new_app()


@app.command()
def compare(
    strategies: Annotated[
        str | None, typer.Option(help="Comma-separated list: single,all-reduce,ddp-powersgd(rank=4).")
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
    scale: Annotated[
        str | None, typer.Option(help="World sizes, such as 1,2,4; each strategy runs at each of them.")
    ] = None,
    launcher: session.Launcher = "local",
    out: session.Out = None,
    as_json: session.Json = False,
    quiet: Quiet = False,
    recipe: session.Recipe = None,
    settings: session.Set = None,
    trust_files: session.Trust = False,
) -> None:
    """Train the same model with several strategies and report what each costs and why.

    Under torchrun the same command is one of the ranks.
    """
    config = session.resolve(locals())
    raise typer.Exit(session.execute(config, out=out, as_json=as_json, quiet=quiet, launcher=launcher))
