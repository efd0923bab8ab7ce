"""The options of every command that trains, how they become a `Config`, and how a session runs and is shown."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli.output import say
from syncline.errors import UsageError, unknown
from syncline.files import read_text
from syncline.results.schema import Results
from syncline.train.config import Config, check, load_recipe, load_run, parse_settings, run_of
from syncline.trust import check_file

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
Launcher = Annotated[str, typer.Option(help="Who starts the ranks: local, or ray for a Ray cluster (RAY_ADDRESS).")]
Recipe = Annotated[str | None, typer.Option(help="A recipe that ships with Syncline, or a TOML file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set train.optimizer='sgd(lr=0.1)'.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that the recipe, the run folder or its plan names, as my.module:name.")
]

_LAUNCHERS = ("local", "ray")
_SECTIONS = {
    "train": (
        "model", "data", "steps", "epochs", "batch", "seed", "checkpoint_every", "start", "freeze", "pipe", "dp",
        "cache", "log_every",
    ),
    "cluster": ("nproc", "nodes", "bandwidth"),
    "compare": ("strategies", "scale"),
}  # fmt: skip
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
    source = f"the recipe {recipe}" if recipe else f"{resume}"
    given = parse_settings(options.get("settings") or [])
    Config().override(given)  # a wrong value is an error also where another option replaces it
    given |= {key: options[name] for name, key in _KEYS.items() if options.get(name) is not None}
    if given.get("compare.scale") and given.get("cluster.nproc"):
        raise UsageError("--scale names the world sizes: leave --nproc out")
    # Asking for local ranks overrides a recipe's nodes; asking for nodes overrides its number of ranks.
    if "cluster.nproc" in given and "cluster.nodes" not in given:
        config = config.override({"cluster.nodes": 0, "cluster.bandwidth": "", "cluster.changes": {}})
    if "cluster.nodes" in given and "cluster.nproc" not in given:
        config = config.override({"cluster.nproc": 0})
    config = config.override(given)
    check(config)
    _check_trust(config, source)
    return config


def _check_trust(config: Config, source: str) -> None:
    """Refuse the user's own code if it is named by a recipe or a run folder, and not by the user."""
    train = config.train
    specs = {
        "--model": [train.model], "--data": [train.data], "--set train.optimizer=": [train.optimizer],
        "--freeze": [train.freeze],
    }  # fmt: skip
    for option, texts in {**specs, "--strategy": config.compare.strategies}.items():
        for text in texts:
            fix = f"repeat it, {option} '{text}', or use --trust if you trust that file"
            check_file(text, source=source, fix=fix)


def is_set(settings: list[str] | None, key: str) -> bool:
    """Whether `--set` names this key."""
    return key in parse_settings(settings or [])


def refuse_settings(settings: list[str] | None, keys: Iterable[str], why: str) -> None:
    """A `UsageError` if `--set` names one of these keys, which the command would replace."""
    for key in parse_settings(settings or []):
        if key in keys:
            raise UsageError(f"--set {key} has no effect here: {why}")


def execute(
    config: Config,
    *,
    out: Path | None,
    as_json: bool,
    quiet: bool = False,
    resume: Path | None = None,
    launcher: str = "local",
) -> int:
    """Run, print the summary (or the JSON) and the report's path. The exit code is 1 if every run crashed."""
    run = session_runner(config, launcher=launcher)
    from syncline.cli.progress import watcher

    console = Console(stderr=as_json)
    watch = watcher(console, quiet=quiet)
    try:
        done = run(config, out=out, watcher=watch, resume=resume)
    finally:
        watch.close()
    if done is None:
        return 0
    path, results = done
    if as_json:
        sys.stdout.write(read_text(path / "results.json"))
    else:
        from syncline.report.tables import print_summary

        print_summary(results, console)
        say(f"report: {path / 'report.html'}\nresults: {path / 'results.json'}", console)
    return 1 if all(row["status"] == "crashed" for row in results["runs"]) else 0


def session_runner(config: Config, *, launcher: str = "local") -> Callable[..., "tuple[Path, Results] | None"]:
    """The function that runs a session here: as one rank of a launcher, on a Ray cluster, or with ranks of its own."""
    from syncline.train.session.torchrun import is_launched, run_launched

    if launcher not in _LAUNCHERS:
        raise unknown("launcher", launcher, _LAUNCHERS)
    if is_launched():
        return run_launched
    if launcher == "ray":
        from syncline.train.session.ray import run_on_ray

        return run_on_ray
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
