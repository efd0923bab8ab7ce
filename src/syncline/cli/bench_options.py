"""Options that several benchmarks share: their types and checks, and how a result is written and printed."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a comma-separated list."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise UsageError(f"{option} takes whole numbers, such as 0,1,2, not '{text}'")
    return tuple(map(int, words))


def codec_specs(text: str | None) -> list[str] | None:
    """The specs of a comma-separated list, each checked."""
    if not text:
        return None
    from syncline.codecs import build

    names = split(text)
    for name in names:
        build(name)
    return names


def prepare(device: str, threads: int | None, steps: int | None = None, seed: int = 0) -> Any:
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


def write_and_print(
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
