"""`syncline bench overlap` and `syncline bench models`: strategies take turns on slow links and are compared."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli import session
from syncline.cli.bench_options import Json, Out, Seed, codec_specs, prepare, write_and_print
from syncline.cli.output import print_json, say
from syncline.cli.status import Quiet, progress_lines
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.spec import split


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
    all_rivals: Annotated[
        bool, typer.Option("--all-rivals", help="Add every rival: all of DDP's options, Horovod, BytePS, DGC.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Instead: the engine with one more of its parts in each row.")
    ] = False,
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
    quiet: Quiet = False,
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

    if ablation and (contestants or buckets or also or all_rivals):
        raise UsageError("--ablation has its own contestants: leave the others out; --compress names its codec")
    stages = bench.ablation(compress or bench.CODEC) if ablation else {}
    chosen = ("local", *stages.values()) if stages else _contestants(contestants, compress, buckets, also)
    if chosen is None and not recipe and not session.is_set(settings, "compare.strategies"):
        chosen = bench.contestants(bench.COMPRESS)
    if all_rivals:
        chosen = (*bench.all_rivals(), *(config.compare.strategies if chosen is None else chosen))
    if chosen is not None:
        config = config.override({"compare.strategies": list(dict.fromkeys(chosen))})
    turns = Turns(rounds=rounds, seconds=seconds, steps=most_steps)
    console = Console(stderr=as_json)
    with progress_lines(console, quiet=quiet) as progress:
        folder, result = bench.measure(config, turns, out=out, progress=progress, stages=stages)
    if as_json:
        print_json(result)
    else:
        console.print()
        print_tables(result, console)
        say(f"overlap.html: {folder / 'overlap.html'}\noverlap.json: {folder / 'overlap.json'}", console)
    raise typer.Exit(1 if all(row["status"] == "crashed" for row in result["rows"]) else 0)


def models(
    only: Annotated[
        str, typer.Option(help="Only cells with all these words: a model, a bandwidth, a strategy or parts of them.")
    ] = "",
    size: Annotated[
        str, typer.Option(help="paper (as published) or small; default: paper on a GPU, small on a CPU.")
    ] = "",
    nodes: Annotated[int, typer.Option(help="Emulated nodes, one rank on each.")] = 2,
    rounds: Annotated[int, typer.Option(help="Measured turns of every strategy.")] = 3,
    seconds: Annotated[float, typer.Option(help="Approximate length of a turn; at least three steps.")] = 4.0,
    most_steps: Annotated[int, typer.Option("--steps", help="The most steps that count in a turn.")] = 20,
    at_once: Annotated[int, typer.Option(help="Strategies that are in memory together; less memory needs fewer.")] = 11,
    seed: Seed = 0,
    again: Annotated[bool, typer.Option("--again", help="Measure also cells that the file has.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One small contest, to see that all works.")] = False,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure HiPress's table: six models under DDP, BytePS, DGC and the engine, at 1, 10 and 25 Gbit/s.

    Finished cells stay in models.json, so that it can run in pieces; an interrupted run goes on with the next cell.
    """
    prepare("cpu", None, most_steps, seed)
    from syncline.bench.models import run as bench
    from syncline.bench.models import table
    from syncline.bench.models.cells import chosen
    from syncline.bench.output import write_json

    chosen(only, quick=quick)
    options = bench.Options(size, nodes, seed, rounds, seconds, most_steps, at_once)
    if quick:
        if size or options != bench.Options(seed=seed):
            raise UsageError("--quick has its own sizes and turns: leave the other options but --only and --out out")
        options = bench.quick_options(seed)
    session.enter_user_namespace()
    console = Console(stderr=as_json)
    folder = out or bench.FOLDER

    def save(result: dict[str, Any]) -> None:
        write_json(result, folder / "models.json")
        write_text(table.page(result), folder / "models.html")

    with progress_lines(console, quiet=quiet) as progress:
        result = bench.measure(options, only=only, quick=quick, again=again, out=folder, save=save, progress=progress)
    write_and_print(
        "models", result, table.console_tables(result), console, out=folder, page=table.page(result), as_json=as_json
    )


def _contestants(strategies: str | None, compress: str | None, buckets: str, also: str) -> tuple[str, ...] | None:
    """The contestants that the options name, or None if the recipe or the default decides."""
    from syncline.bench.overlap import run as bench

    if strategies is not None:
        if compress or buckets or also:
            raise UsageError("--strategies names the contestants itself: leave --compress, --buckets and --also out")
        return tuple(split(strategies))
    if not (compress or buckets or also):
        return None
    more = codec_specs(also) or []
    codec_specs(compress)
    try:
        sizes = [float(word) for word in split(buckets)] or bench.BUCKETS
    except ValueError:
        raise UsageError(f"--buckets takes sizes in MB, such as 5,25,100, not '{buckets}'") from None
    return bench.contestants(compress or bench.COMPRESS, buckets=sizes, also=more)
