"""`syncline bench`: one command for each benchmark, with the options that this benchmark has."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.cli.bench_contests import models, overlap
from syncline.cli.bench_options import (
    BlockSteps,
    Codecs,
    Device,
    Json,
    Model,
    Out,
    Seed,
    Threads,
    codec_specs,
    prepare,
    whole_numbers,
    write_and_print,
)
from syncline.cli.status import Quiet, progress_lines
from syncline.errors import UsageError
from syncline.spec import split
from syncline.train.config import MOST_RANKS

app = new_app()


@app.callback()
def _bench() -> None:
    """Measure codecs, training with them, overhead, overlap, models, frameworks, pipelines, and the diagnosis."""


@app.command()
def codecs(
    codecs: Codecs = None,
    device: Device = "cpu",
    largest_mb: Annotated[float, typer.Option(help="Leave out larger tensors.")] = 400.0,
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure every codec: speed against a copy of the same tensor, compression ratio and error."""
    torch_device = prepare(device, threads)
    from syncline.bench.codecs import speed, table

    shapes = [shape for shape in speed.SHAPES if shape[0] * shape[1] * 4 <= largest_mb * 1e6]
    if not shapes:
        raise UsageError(f"--largest-mb {largest_mb:g} leaves no size: the smallest is 0.066")
    console = Console(stderr=as_json)
    names = codec_specs(codecs)
    with progress_lines(console, quiet=quiet) as progress:
        result = speed.measure(torch_device, names=names, shapes=shapes, progress=progress)
    shown = table.console_table(result, width=console.width)
    write_and_print("codecs", result, shown, console, out=out, page=table.page(result), as_json=as_json)


@app.command()
def quality(
    tasks: Annotated[str, typer.Option(help="Comma-separated tasks, or all; vgg has every codec.")] = "vgg",
    codecs: Annotated[
        str | None, typer.Option(help="Comma-separated codec specs, auto included; default: those of the task.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated random seeds.")] = "0,1,2",
    size: Annotated[str, typer.Option(help="small, for a CPU; or full, the published models.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Training steps; default: those of the task.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step over all ranks.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model for the task.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data for the task.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Another optimizer for the task.")] = None,
    workers: Annotated[int, typer.Option(help="Ranks, in lockstep or real.")] = 2,
    bandwidth: Annotated[
        str, typer.Option(help="Links of real ranks, such as 100Mbit; loopback: this machine's, without a limit.")
    ] = "100Mbit",
    on_ranks: Annotated[
        bool, typer.Option("--on-ranks", help="Train all codecs on real ranks, with wall times; auto always does.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train with every codec and with auto over several seeds: loss and accuracy against dense, with intervals.

    Finished trainings are kept in OUT/quality.json and not repeated, so it can run in pieces.
    """
    prepare(device, threads, steps)
    from syncline.bench.quality import run as bench
    from syncline.bench.quality import table
    from syncline.bench.quality.on_ranks import LOOPBACK
    from syncline.bench.quality.tasks import chosen_tasks, jobs
    from syncline.cluster.quantities import parse_bandwidth
    from syncline.plan.auto_spec import parse_auto

    if bandwidth != LOOPBACK:
        parse_bandwidth(bandwidth)
    if not 2 <= workers <= MOST_RANKS:
        raise UsageError(f"--workers must be 2 to {MOST_RANKS}, not {workers}")
    asked = {"steps": steps, "batch": batch, "model": model, "data": data, "optimizer": optimizer}
    names = None if codecs is None else split(codecs)
    for name in names or ():
        if parse_auto(name) is None:
            codec_specs(name)
    trainings = jobs(
        chosen_tasks(split(tasks)), asked=names, seeds=whole_numbers("--seeds", seeds), size=size, network=bandwidth,
        on_ranks=on_ranks, changes={key: value for key, value in asked.items() if value is not None},
        workers=workers, device=device,
    )  # fmt: skip
    if any(job.network not in ("", LOOPBACK) for job in trainings):
        session.enter_user_namespace()
    console = Console(stderr=as_json)
    folder = out or Path("runs") / "bench-quality"
    with progress_lines(console, quiet=quiet) as progress:
        result = bench.measure(trainings, folder / "quality.json", progress=progress)
    shown = table.console_table(result)
    write_and_print("quality", result, shown, console, out=out, page=table.page(result), as_json=as_json)


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
    quiet: Quiet = False,
    never_slower: Annotated[
        bool, typer.Option(help="Instead: the best DDP on several networks. CPU: 50 minutes; CUDA: eight minutes.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="With --never-slower: three small cells.")] = False,
    only: Annotated[
        str, typer.Option(help="With --never-slower: only cells whose label contains this text, such as 1Gbit.")
    ] = "",
) -> None:
    """Measure what attach costs per step, against DDP, with no network in the way."""
    if never_slower:
        if (model and device == "cpu") or codecs or steps or threads:
            raise UsageError("--never-slower has its own models, codecs and steps: leave those options out")
        session.enter_user_namespace()
    elif quick or only:
        raise UsageError("--quick and --only are for --never-slower: use fewer --steps")
    prepare(device, threads, steps, seed)
    from syncline.bench.overhead import run as bench
    from syncline.bench.overhead.rows import console_table

    console = Console(stderr=as_json)
    if never_slower:
        from syncline.bench.overhead import gpu_claims
        from syncline.bench.overhead import never_slower as claims
        from syncline.report.tables import simple_table

        page = ""
        if device == "cuda":
            with progress_lines(console, quiet=quiet) as progress:
                result = gpu_claims.measure(gpu_claims.chosen(model), progress=progress)
            shown, page = simple_table("never slower", *gpu_claims.table(result)), gpu_claims.page(result)
        else:
            file = (out or Path("runs") / "bench-never-slower") / "never-slower.json"
            with progress_lines(console, quiet=quiet) as progress:
                result = bench.claims_measured(file, quick=quick, only=only, progress=progress)
            shown = simple_table("never slower", *claims.table(result))
        write_and_print("never-slower", result, shown, console, out=out, as_json=as_json, page=page)
        return
    options = bench.options(device, codec_specs(codecs), model=model, steps=steps, threads=threads, seed=seed)
    with progress_lines(console, quiet=quiet) as progress:
        result = bench.measure(options, progress=progress)
    write_and_print("overhead", result, console_table(result, width=console.width), console, out=out, as_json=as_json)


@app.command()
def recorder(
    device: Device = "cpu",
    model: Model = None,
    steps: BlockSteps = None,
    seed: Seed = 0,
    threads: Threads = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what recording a trace costs: steps with the recorder on and off."""
    prepare(device, threads, steps, seed)
    from syncline.bench.recorder import run as bench
    from syncline.bench.recorder.rows import console_table

    console = Console(stderr=as_json)
    options = bench.options(device, model=model, steps=steps, threads=threads, seed=seed)
    with progress_lines(console, quiet=quiet) as progress:
        result = bench.measure(options, progress=progress)
    write_and_print("recorder", result, console_table(result), console, out=out, as_json=as_json)


@app.command()
def causes(
    runs: Annotated[int, typer.Option(help="Cases to draw from the seed.")] = 24,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: its causes are those that only a GPU shows.")] = "cpu",
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Inject causes of slowness into training loops: does the analysis name each, and what it costs?"""
    if device == "cpu":
        session.enter_user_namespace()
    prepare(device, None, runs, seed)
    from syncline.bench.causes import run as bench

    console = Console(stderr=as_json)
    with progress_lines(console, quiet=quiet) as progress:
        result = bench.run(runs, seed=seed, device=device, progress=progress)
    write_and_print("causes", result, bench.console_table(result), console, out=out, as_json=as_json)


@app.command()
def integrations(
    parts: Annotated[
        str, typer.Option(help="Comma-separated: fsdp (speed), fsdp-loss, trainer.")
    ] = "fsdp,fsdp-loss,trainer",
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, to see that all works.")] = False,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure FSDP2 against torch's hybrid sharding, and the Trainer of transformers against its DDP, on slow links."""
    session.enter_user_namespace()
    from syncline.bench.integrations.rows import loss_table, table
    from syncline.bench.integrations.run import measure
    from syncline.report.tables import simple_table

    console = Console(stderr=as_json)
    with progress_lines(console, quiet=quiet) as progress:
        result = measure(split(parts), device=device, quick=quick, progress=progress)
    tables = {"integrations": table(result), "FSDP2: losses": loss_table(result)}
    shown = Group(*(simple_table(title, *lines, fold=True) for title, lines in tables.items() if lines[1]))
    write_and_print("integrations", result, shown, console, out=out, as_json=as_json)


@app.command()
def pipeline(
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="The data of the fine-tuning.")] = None,
    freeze: Annotated[
        str | None, typer.Option(help="The freeze policy; default: schedule(alpha=0.9, after=2, keep=1).")
    ] = None,
    device: Device = "cpu",
    ranks: Annotated[int | None, typer.Option(help="Ranks on this machine; default: 4.")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages at the start; default: 4.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size of all ranks together; default: 256.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of the fine-tuning; default: 12.")] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated random seeds.")] = "0,1,2",
    ways: Annotated[str | None, typer.Option(help="Comma-separated ways to train; default: all.")] = None,
    batches: Annotated[str, typer.Option(help="DDP against Pipe+DDP for these batch sizes; empty: leave out.")] = "128",
    weights: Annotated[
        Path | None, typer.Option(help="File of pretrained weights; made by pretraining if it does not exist.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A run of seconds, to see that all works.")] = False,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune with freezing, pipelines that shrink and cached activations: time to accuracy against DDP."""
    prepare(device, None)
    from syncline.bench.pipeline import run as bench
    from syncline.bench.pipeline import table

    asked: dict[str, Any] = {
        "model": model,
        "data": data,
        "freeze": freeze,
        "device": device,
        "ranks": ranks,
        "stages": stages,
    }
    asked |= {"batch": batch, "epochs": epochs, "ways": tuple(split(ways)) if ways else None}
    asked |= {} if quick else {"seeds": whole_numbers("--seeds", seeds)}
    options = bench.options_for(asked, quick=quick)
    console = Console(stderr=as_json)
    sizes = whole_numbers("--batches", batches) if batches and not quick else ()
    with progress_lines(console, quiet=quiet) as progress:
        result = bench.measure(options, progress=progress, weights=weights, batches=sizes)
    shown = table.console_table(result)
    write_and_print("pipeline", result, shown, console, out=out, page=table.page(result), as_json=as_json)


app.command()(overlap)
app.command()(models)
