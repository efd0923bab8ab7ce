"""The options of every command that trains, how they become a `Config`, and how a session runs and is shown."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli.output import say
from syncline.errors import UsageError
from syncline.results.schema import Results
from syncline.train.config import Config, load_recipe, load_run, parse_settings, run_of

Model = Annotated[str | None, typer.Option(help="A model: vgg11, resnet50, vit(size=tiny), my.module:factory ...")]
Data = Annotated[str | None, typer.Option(help="A data set: auto, shapes, fashion-mnist, cifar10(root=DIR), text ...")]
Nproc = Annotated[int | None, typer.Option(help="Number of ranks; without --nodes, all on this machine's loopback.")]
Nodes = Annotated[int | None, typer.Option(help="Number of emulated nodes; each is a network namespace.")]
Bandwidth = Annotated[str | None, typer.Option(help="Bandwidth of each node's link in each direction: 1Gbit, 200Mbit.")]
Steps = Annotated[int | None, typer.Option(help="Steps per epoch; 0 means the whole data set.")]
Epochs = Annotated[int | None, typer.Option(help="Number of epochs.")]
Batch = Annotated[int | None, typer.Option(help="Samples per step in total, split over the ranks.")]
Seed = Annotated[int | None, typer.Option(help="Random seed of the model, the samples and their order.")]
Out = Annotated[Path | None, typer.Option(help="The run folder; an earlier run there is moved aside.")]
Json = Annotated[bool, typer.Option("--json", help="Print results.json on standard output and nothing else.")]
Recipe = Annotated[str | None, typer.Option(help="A recipe that ships with Syncline, or a TOML file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set train.optimizer='sgd(lr=0.1)'.")]

_SECTIONS = {
    "train": ("model", "data", "steps", "epochs", "batch", "seed", "checkpoint_every"),
    "cluster": ("nproc", "nodes", "bandwidth"),
    "compare": ("strategies", "scale"),
}
"""The options that are settings of the same name, by section."""
_KEYS = {name: f"{section}.{name}" for section, names in _SECTIONS.items() for name in names}


def resolve(options: Mapping[str, Any]) -> Config:
    """The settings that a command's options ask for, by the names of its parameters; None means not given.

    First a recipe (or an earlier run's settings, or the defaults), then `--set`, then the other options.
    """
    recipe, resume = options.get("recipe"), options.get("resume")
    if resume is not None and recipe:
        raise UsageError("--resume takes the run's own settings: leave --recipe out")
    config = load_recipe(recipe) if recipe else Config() if resume is None else load_run(run_of(resume))
    given = parse_settings(options.get("settings") or [])
    given |= {key: options[name] for name, key in _KEYS.items() if options.get(name) is not None}
    if given.get("compare.scale") and given.get("cluster.nproc"):
        raise UsageError("--scale names the world sizes: leave --nproc out")
    # Asking for local ranks overrides a recipe's nodes; asking for nodes overrides its number of ranks.
    if "cluster.nproc" in given and "cluster.nodes" not in given:
        config = config.override({"cluster.nodes": 0, "cluster.bandwidth": "", "cluster.changes": {}})
    if "cluster.nodes" in given and "cluster.nproc" not in given:
        config = config.override({"cluster.nproc": 0})
    return config.override(given)


def execute(config: Config, *, out: Path | None, as_json: bool, resume: Path | None = None) -> int:
    """Run, print the summary (or the JSON) and the report's path. The exit code is 1 if every run crashed."""
    run = session_runner(config)
    from syncline.cli.progress import watcher

    console = Console(stderr=as_json)
    watch = watcher(console)
    try:
        done = run(config, out=out, watcher=watch, resume=resume)
    finally:
        watch.close()
    if done is None:
        return 0
    path, results = done
    if as_json:
        sys.stdout.write((path / "results.json").read_text())
    else:
        from syncline.report.tables import print_summary

        print_summary(results, console)
        say(f"report: {path / 'report.html'}\nresults: {path / 'results.json'}", console)
    return 1 if all(row["status"] == "crashed" for row in results["runs"]) else 0


def session_runner(config: Config) -> Callable[..., "tuple[Path, Results] | None"]:
    """The function that runs a session here: as one rank of a launcher, or with ranks of its own."""
    from syncline.train.session.torchrun import is_launched, run_launched

    if is_launched():
        return run_launched
    if config.cluster.nodes:
        enter_user_namespace()
    from syncline.train.session.local import run_local

    return run_local


def enter_user_namespace() -> None:
    """Give an ordinary user's process the right to make nodes; the command may start again for that."""
    from syncline.cluster.capabilities import capabilities
    from syncline.cluster.privileges import ensure_privileges

    if capabilities().how == "userns":
        ensure_privileges(reexec=True)
