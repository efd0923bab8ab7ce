"""`syncline bench`: measure codecs, what they do to training, and what attaching and recording cost."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.execute import print_json
from syncline.errors import UsageError, unknown
from syncline.spec import split

_WHAT = ("codecs", "convergence", "overhead", "recorder", "overlap")


def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="codecs: speed, ratio, error. convergence: loss curves and accuracy. overhead: attach against DDP."
            " recorder: steps with it on and off. overlap: steps on slow links against DDP, see syncline bench overlap"
            " --help."
        ),
    ],
    codecs: Annotated[
        str | None, typer.Option(help="Comma list of codec specs; default: all (overhead: bf16, powersgd).")
    ] = None,
    device: Annotated[str, typer.Option(help="codecs, overhead, recorder: cpu or cuda.")] = "cpu",
    largest_mb: Annotated[float, typer.Option(help="codecs: leave larger tensors out.")] = 400.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads (overhead, recorder: of a rank).")] = None,
    steps: Annotated[
        int | None, typer.Option(help="convergence: training steps a codec, 800. overhead, recorder: steps a block.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="convergence, overhead, recorder: the model.")] = None,
    seed: Annotated[int, typer.Option(help="convergence, overhead, recorder: of model, data and order.")] = 0,
    data: Annotated[
        str, typer.Option(help="convergence: Fashion-MNIST where present, else generated images.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the JSON and the page; default: runs/bench-NAME.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON on standard output and nothing else.")
    ] = False,
) -> None:
    """Measure codecs (speed against a copy of the same tensor, training against dense), attach or the recorder."""
    if what not in _WHAT:
        raise unknown("benchmark", what, _WHAT)
    if what == "overlap":
        raise UsageError("its options come after it: syncline bench overlap --recipe hipress-vgg19")
    import torch

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device '{device}' is not here: use --device cpu")
    if steps is not None and steps < 1:
        raise UsageError(f"--steps must be at least 1, not {steps}")
    if threads:
        torch.set_num_threads(threads)
    from syncline.codecs import build

    names = split(codecs) if codecs else None
    for name in names or []:
        build(name)
    console = Console(stderr=as_json)
    folder = out or Path("runs") / f"bench-{what}"

    def progress(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    page: str | None = None
    if what == "overhead":
        from syncline.bench.overhead import run as overhead

        chosen = overhead.setting(device, names, model=model, steps=steps, threads=threads, seed=seed)
        result = overhead.measure(chosen, progress=progress)
        table = overhead.rich_table(result, width=console.width)
        for text in result["warnings"]:
            progress(f"warning: {text}")
    elif what == "recorder":
        from syncline.bench.recorder import run as recorder

        wanted = recorder.setting(device, model=model, steps=steps, threads=threads, seed=seed)
        result = recorder.measure(wanted, progress=progress)
        table = recorder.rich_table(result)
        for text in result["warnings"]:
            progress(f"warning: {text}")
    elif what == "codecs":
        from syncline.bench.codecs import page as plot
        from syncline.bench.codecs import run as speed

        shapes = [shape for shape in speed.SHAPES if shape[0] * shape[1] * 4 <= largest_mb * 1e6]
        if not shapes:
            raise UsageError(f"--largest-mb {largest_mb:g} leaves no size: the smallest is 0.066")
        result = speed.measure(torch.device(device), names=names, shapes=shapes)
        page = plot.page(result)
        table = speed.rich_table(result, width=console.width)
    else:
        from rich.table import Table

        from syncline.bench.convergence import page as curves
        from syncline.bench.convergence.run import Setting, measure

        setting = Setting(steps=steps or Setting.steps, data=data, seed=seed, model=model or Setting.model)
        result = measure(setting, names, progress=progress)
        page = curves.page(result)
        table = Table(*curves.HEADINGS, title=f"convergence on {result['setting']['data']}", box=None, pad_edge=False)
        for row in result["rows"]:
            table.add_row(*curves.cells(row))
    from syncline.files import write_text

    write_text(json.dumps(result, indent=1) + "\n", folder / f"{what}.json")
    if page is not None:
        write_text(page, folder / f"{what}.html")
    if as_json:
        print_json(result)
        return
    console.print(table)
    where = folder / f"{what}.{'json' if page is None else 'html'}"
    console.print(f"{'figures' if page is None else 'page'}: {where}", markup=False, highlight=False, soft_wrap=True)
