"""Output of the benchmarks: environment, console tables and JSON files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from syncline.files import write_text


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware on which the figures depend."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "device": str(name), "threads": torch.get_num_threads()}


def rich_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, fold: bool = True) -> Any:
    """A table for a terminal; `fold` lets long cells take several lines. Needs rich."""
    from rich.table import Table

    table = Table(title=title, box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        align = "right" if number else "left"
        table.add_column(heading, justify=align, no_wrap=not fold, overflow="fold")  # type: ignore[arg-type]
    for cells in rows:
        table.add_row(*cells)
    return table


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write the result atomically."""
    write_text(json.dumps(result, indent=1) + "\n", path)
