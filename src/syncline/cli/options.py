"""The options that `train` and `compare` share, and how they become a resolved `Config`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from syncline.errors import UsageError
from syncline.train.config import Config, load_recipe, load_run, parse_settings, run_of

Model = Annotated[str | None, typer.Option(help="A model: vgg11, resnet50, vit(size=tiny), my.module:factory ...")]
Data = Annotated[str | None, typer.Option(help="A data set: auto, shapes, fashion-mnist, cifar10(root=DIR), text ...")]
Nproc = Annotated[int | None, typer.Option(help="Ranks; without --nodes all on this machine's loopback.")]
Nodes = Annotated[int | None, typer.Option(help="Emulated nodes, one network namespace each.")]
Bandwidth = Annotated[str | None, typer.Option(help="Of each node's link, each way: 1Gbit, 200Mbit.")]
Steps = Annotated[int | None, typer.Option(help="Steps an epoch; 0 is the whole data set.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs.")]
Batch = Annotated[int | None, typer.Option(help="Samples a step in total, split over the ranks.")]
Seed = Annotated[int | None, typer.Option(help="Fixes model, samples and their order.")]
Out = Annotated[Path | None, typer.Option(help="The run folder; an earlier run there is moved aside.")]
Json = Annotated[bool, typer.Option("--json", help="Print results.json on standard output and nothing else.")]
Recipe = Annotated[str | None, typer.Option(help="A recipe that ships with Syncline, or a TOML file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set train.optimizer='sgd(lr=0.1)'.")]

CheckpointEvery = Annotated[
    int | None, typer.Option(help="Steps between checkpoints, for --resume; one more is written at the end.")
]
Resume = Annotated[
    Path | None, typer.Option(help="Go on with the run in this folder, from its newest checkpoint or the one named.")
]

_KEYS = {
    "model": "train.model",
    "data": "train.data",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "batch": "train.batch",
    "seed": "train.seed",
    "checkpoint_every": "train.checkpoint_every",
    "nproc": "cluster.nproc",
    "nodes": "cluster.nodes",
    "bandwidth": "cluster.bandwidth",
    "strategies": "compare.strategies",
    "scale": "compare.scale",
}


def resolve(recipe: str | None, settings: list[str] | None, *, resume: Path | None = None, **options: Any) -> Config:
    """A recipe (or an earlier run's settings, or the defaults), then `--set`, then the options that were given."""
    if resume is not None and recipe:
        raise UsageError("--resume takes the run's own settings: leave --recipe out")
    config = load_recipe(recipe) if recipe else Config() if resume is None else load_run(run_of(resume))
    given = parse_settings(settings or [])
    given |= {_KEYS[name]: value for name, value in options.items() if value is not None}
    if given.get("compare.scale") and given.get("cluster.nproc"):
        raise UsageError("--scale names the world sizes: leave --nproc out")
    # A recipe's nodes do not hold for somebody who asks for local ranks, nor its ranks for somebody who asks for nodes.
    if "cluster.nproc" in given and "cluster.nodes" not in given:
        config = config.override({"cluster.nodes": 0, "cluster.bandwidth": "", "cluster.changes": {}})
    if "cluster.nodes" in given and "cluster.nproc" not in given:
        config = config.override({"cluster.nproc": 0})
    return config.override(given)
