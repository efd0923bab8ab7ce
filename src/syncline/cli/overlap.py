"""`syncline bench overlap`: compute alone, DDP at its best and the engine, interleaved on emulated nodes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli import options as o
from syncline.cli.execute import become_able, print_json
from syncline.errors import UsageError
from syncline.spec import split


def overlap(
    what: Annotated[str, typer.Argument(metavar="overlap", help="The benchmark.")],
    recipe: o.Recipe = None,
    model: o.Model = None,
    data: o.Data = None,
    nodes: o.Nodes = None,
    nproc: o.Nproc = None,
    bandwidth: o.Bandwidth = None,
    batch: o.Batch = None,
    seed: o.Seed = None,
    compress: Annotated[
        str | None, typer.Option(help="The codec to compare with; powersgd(rank=64), or the recipe's contestants.")
    ] = None,
    buckets: Annotated[str, typer.Option(help="DDP's bucket sizes in MB, each measured; the best is the rival.")] = "",
    also: Annotated[str, typer.Option(help="Comma list of more codecs for the engine: powersgd(rank=64) | bf16.")] = "",
    strategies: Annotated[
        str | None, typer.Option(help="The contestants themselves, instead of --compress, --buckets and --also.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Turns of every contestant that count.")] = 5,
    seconds: Annotated[float, typer.Option(help="About how long a turn counts; at least three steps.")] = 4.0,
    steps: Annotated[int, typer.Option(help="The most steps that count in a turn.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder; default: runs/bench-overlap, an earlier one moves.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print overlap.json on standard output, nothing else.")
    ] = False,
    settings: o.Set = None,
) -> None:
    """Measure steps on slow links: compute alone, torch's DDP at its best and the engine, turn by turn.

    All are started at once, then one at a time trains; ratios are of turns in one round, the bound is
    max(compute, wire). Writes overlap.json, overlap.html with two timelines, and a trace of each.
    """
    config = o.resolve(
        recipe, settings, model=model, data=data, nodes=nodes, nproc=nproc, bandwidth=bandwidth, batch=batch, seed=seed
    )
    if not recipe and not config.cluster.nodes and nproc is None:
        config = config.override({"cluster.nodes": 2, "cluster.bandwidth": config.cluster.bandwidth or "1Gbit"})
    if config.cluster.nodes:
        become_able()
    from syncline.bench.overlap import run as bench
    from syncline.bench.overlap.course import Turns
    from syncline.bench.overlap.table import print_tables

    chosen = _contestants(strategies, compress, buckets, also)
    if chosen is None and not recipe:
        chosen = bench.contestants(bench.COMPRESS)
    if chosen is not None:
        config = config.override({"compare.strategies": list(chosen)})
    turns = Turns(rounds=rounds, seconds=seconds, steps=steps)
    console = Console(stderr=as_json)

    def progress(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder, result = bench.measure(config, turns, out=out, progress=progress)
    if as_json:
        print_json(result)
    else:
        console.print()
        print_tables(result, console)
        for name in ("overlap.html", "overlap.json"):
            console.print(f"{name}: {folder / name}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if all(row["status"] == "crashed" for row in result["rows"]) else 0)


def _contestants(strategies: str | None, compress: str | None, buckets: str, also: str) -> tuple[str, ...] | None:
    """Those that the options name; None where they name none, and a recipe may."""
    from syncline.bench.overlap import run as bench
    from syncline.codecs import build

    if strategies is not None:
        if compress or buckets or also:
            raise UsageError("--strategies names the contestants itself: leave --compress, --buckets and --also out")
        return tuple(split(strategies))
    if not (compress or buckets or also):
        return None
    for codec in [*([compress] if compress else []), *split(also)]:
        build(codec)
    try:
        sizes = [float(word) for word in split(buckets)] or bench.BUCKETS
    except ValueError:
        raise UsageError(f"--buckets takes sizes in MB, such as 5,25,100, not '{buckets}'") from None
    return bench.contestants(compress or bench.COMPRESS, buckets=sizes, also=split(also))
