"""`syncline bench`: one command for each benchmark, with the options that this benchmark has."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.spec import split
from syncline.train.config import MOST_THREADS

Codecs = Annotated[str | None, typer.Option(help="Comma-separated list of codec specs; default: all.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads (of each rank, where there are ranks).")]
Seed = Annotated[int, typer.Option(help="Random seed of the model, the data and their order.")]
Model = Annotated[str | None, typer.Option(help="The model.")]
BlockSteps = Annotated[int | None, typer.Option(help="Steps per measured block.")]
Out = Annotated[Path | None, typer.Option(help="Output folder; default: runs/bench-NAME.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON on standard output and nothing else.")]

app = new_app()


@app.callback()
def _bench() -> None:
    """Measure codecs, their effect on training, the cost of attach and recording, overlap, and the diagnosis."""


@app.command()
def codecs(
    codecs: Codecs = None,
    device: Device = "cpu",
    largest_mb: Annotated[float, typer.Option(help="Leave out larger tensors.")] = 400.0,
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure every codec: speed against a copy of the same tensor, compression ratio and error."""
    torch_device = _prepare(device, threads)
    from syncline.bench.codecs import speed, table

    shapes = [shape for shape in speed.SHAPES if shape[0] * shape[1] * 4 <= largest_mb * 1e6]
    if not shapes:
        raise UsageError(f"--largest-mb {largest_mb:g} leaves no size: the smallest is 0.066")
    console = Console(stderr=as_json)
    progress = partial(say, console=console)
    result = speed.measure(torch_device, names=_codec_names(codecs), shapes=shapes, progress=progress)
    shown = table.console_table(result, width=console.width)
    _finish("codecs", result, shown, console, out=out, page=table.page(result), as_json=as_json)


@app.command()
def convergence(
    codecs: Codecs = None,
    steps: Annotated[int | None, typer.Option(help="Training steps for each codec; default: 800.")] = None,
    model: Model = None,
    data: Annotated[str, typer.Option(help="A data set; auto: Fashion-MNIST or else generated images.")] = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a small model with every codec: loss curves and accuracy, against dense."""
    _prepare("cpu", threads, steps, seed)
    from syncline.bench.convergence import table
    from syncline.bench.convergence.run import Options, measure

    console = Console(stderr=as_json)
    options = Options(steps=steps or Options.steps, data=data, seed=seed, model=model or Options.model)
    result = measure(options, _codec_names(codecs), progress=partial(say, console=console))
    _finish(
        "convergence", result, table.console_table(result), console, out=out, page=table.page(result), as_json=as_json
    )


@app.command()
def overhead(
    codecs: Annotated[str | None, typer.Option(help="Comma-separated codec specs; default: bf16, powersgd.")] = None,
    device: Device = "cpu",
    model: Model = None,
    steps: BlockSteps = None,
    seed: Seed = 0,
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
    never_slower: Annotated[
        bool, typer.Option(help="Instead: the best DDP on several networks, with first steps; about 18 minutes.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="With --never-slower: two small cells.")] = False,
) -> None:
    """Measure what attach costs per step, against DDP, with no network in the way."""
    if never_slower:
        if device != "cpu" or codecs or model or steps or threads:
            raise UsageError("--never-slower has its own models, codecs and steps, on the CPU: leave those options out")
        session.enter_user_namespace()
    elif quick:
        raise UsageError("--quick is for --never-slower: use fewer --steps")
    _prepare(device, threads, steps, seed)
    from syncline.bench.overhead import run as bench
    from syncline.bench.overhead.rows import console_table

    console = Console(stderr=as_json)
    if never_slower:
        from syncline.bench.overhead import never_slower as claims
        from syncline.report.tables import simple_table

        result = claims.measure(quick=quick, progress=lambda text: say(text, console))
        shown = simple_table("never slower", *claims.table(result))
        _finish("never-slower", result, shown, console, out=out, as_json=as_json)
        return
    options = bench.options(device, _codec_names(codecs), model=model, steps=steps, threads=threads, seed=seed)
    result = bench.measure(options, progress=partial(say, console=console))
    _finish("overhead", result, console_table(result, width=console.width), console, out=out, as_json=as_json)


@app.command()
def recorder(
    device: Device = "cpu",
    model: Model = None,
    steps: BlockSteps = None,
    seed: Seed = 0,
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what recording a trace costs: steps with the recorder on and off."""
    _prepare(device, threads, steps, seed)
    from syncline.bench.recorder import run as bench
    from syncline.bench.recorder.rows import console_table

    console = Console(stderr=as_json)
    options = bench.options(device, model=model, steps=steps, threads=threads, seed=seed)
    result = bench.measure(options, progress=partial(say, console=console))
    _finish("recorder", result, console_table(result), console, out=out, as_json=as_json)


@app.command()
def causes(
    runs: Annotated[int, typer.Option(help="Cases to draw from the seed.")] = 24,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: its causes are those that only a GPU shows.")] = "cpu",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Inject causes of slowness into training loops: does the analysis name each, and what it costs?"""
    if device == "cpu":
        session.enter_user_namespace()
    _prepare(device, None, runs, seed)
    from syncline.bench.causes import run as bench

    console = Console(stderr=as_json)
    result = bench.run(runs, seed=seed, device=device, progress=lambda text: say(text, console))
    _finish("causes", result, bench.console_table(result), console, out=out, as_json=as_json)


@app.command()
def overlap(
    recipe: session.Recipe = None,
    model: session.Model = None,
    data: session.Data = None,
    nodes: session.Nodes = None,
    nproc: session.Nproc = None,
    bandwidth: session.Bandwidth = None,
    batch: session.Batch = None,
    seed: session.Seed = None,
    compress: Annotated[
        str | None,
        typer.Option(help="The codec to compare with; default: the recipe's contestants, or powersgd(rank=64)."),
    ] = None,
    buckets: Annotated[
        str, typer.Option(help="DDP's bucket sizes in MB; each is measured, the best is the rival.")
    ] = "",
    also: Annotated[
        str, typer.Option(help="More codecs for the engine, comma-separated: powersgd(rank=64) | bf16.")
    ] = "",
    contestants: Annotated[
        str | None,
        typer.Option("--strategies", help="The contestants themselves, instead of --compress, --buckets and --also."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Measured turns of every contestant.")] = 5,
    seconds: Annotated[float, typer.Option(help="Approximate length of a turn; at least three steps.")] = 4.0,
    most_steps: Annotated[int, typer.Option("--steps", help="The most steps that count in a turn.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Output folder, default runs/bench-overlap; an earlier one is moved aside.")
    ] = None,
    as_json: Json = False,
    settings: session.Set = None,
    trust_files: session.Trust = False,
) -> None:
    """Measure steps on slow links: compute alone, torch's DDP at its best and the engine, in turns.

    All start at once, then one at a time trains. Ratios compare turns of one round; the bound is max(compute,
    network). Writes overlap.json, overlap.html with two timelines, and a trace of each contestant.
    """
    config = session.resolve(locals())
    if not recipe and not config.cluster.nodes and nproc is None:
        config = config.override({"cluster.nodes": 2, "cluster.bandwidth": config.cluster.bandwidth or "1Gbit"})
    if config.cluster.nodes:
        session.enter_user_namespace()
    from syncline.bench.overlap import run as bench
    from syncline.bench.overlap.rounds import Turns
    from syncline.bench.overlap.table import print_tables

    chosen = _contestants(contestants, compress, buckets, also)
    if chosen is None and not recipe and not session.is_set(settings, "compare.strategies"):
        chosen = bench.contestants(bench.COMPRESS)
    if chosen is not None:
        config = config.override({"compare.strategies": list(chosen)})
    turns = Turns(rounds=rounds, seconds=seconds, steps=most_steps)
    console = Console(stderr=as_json)
    folder, result = bench.measure(config, turns, out=out, progress=partial(say, console=console))
    if as_json:
        print_json(result)
    else:
        console.print()
        print_tables(result, console)
        say(f"overlap.html: {folder / 'overlap.html'}\noverlap.json: {folder / 'overlap.json'}", console)
    raise typer.Exit(1 if all(row["status"] == "crashed" for row in result["rows"]) else 0)


def _contestants(strategies: str | None, compress: str | None, buckets: str, also: str) -> tuple[str, ...] | None:
    """The contestants that the options name, or None if the recipe or the default decides."""
    from syncline.bench.overlap import run as bench

    if strategies is not None:
        if compress or buckets or also:
            raise UsageError("--strategies names the contestants itself: leave --compress, --buckets and --also out")
        return tuple(split(strategies))
    if not (compress or buckets or also):
        return None
    more = _codec_names(also) or []
    _codec_names(compress)
    try:
        sizes = [float(word) for word in split(buckets)] or bench.BUCKETS
    except ValueError:
        raise UsageError(f"--buckets takes sizes in MB, such as 5,25,100, not '{buckets}'") from None
    return bench.contestants(compress or bench.COMPRESS, buckets=sizes, also=more)


def _codec_names(text: str | None) -> list[str] | None:
    """The specs of a comma-separated list, each checked."""
    if not text:
        return None
    from syncline.codecs import build

    names = split(text)
    for name in names:
        build(name)
    return names


def _prepare(device: str, threads: int | None, steps: int | None = None, seed: int = 0) -> Any:
    """Check the options that several benchmarks share, set the number of threads; returns the torch device."""
    import torch

    from syncline.train.rank.join import check_device

    if steps is not None and not 1 <= steps < 2**31:
        raise UsageError(f"--steps must be at least 1 and below {2**31}, not {steps}")
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must be 0 to {2**31 - 1}, not {seed}")
    check_device(device, option="--device ")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads must be 1 to {MOST_THREADS}, not {threads}")
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.device(device)


def _finish(
    name: str, result: dict[str, Any], table: Any, console: Console, *, out: Path | None, as_json: bool, page: str = ""
) -> None:
    """Write NAME.json and, if there is a page, NAME.html; print the table or the JSON."""
    from syncline.bench.output import write_json

    for text in result.get("warnings", ()):
        say(f"warning: {text}", console)
    folder = out or Path("runs") / f"bench-{name}"
    write_json(result, folder / f"{name}.json")
    if page:
        write_text(page, folder / f"{name}.html")
    if as_json:
        print_json(result)
        return
    console.print(table)
    say(f"page: {folder / name}.html" if page else f"figures: {folder / name}.json", console)
