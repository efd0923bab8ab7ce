"""`python -m syncline.bench.codecs`: measure the operators and the codecs where only torch is installed.

`syncline bench codecs` measures the codecs alone.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from syncline.bench.codecs import operators
from syncline.bench.codecs.speed import measure
from syncline.bench.codecs.table import COLUMNS, operator_table, page
from syncline.bench.output import environment, write_json
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.report.figures import tabulate, text_table
from syncline.spec import split
from syncline.train.rank.join import check_device

# Numbers of values for the operators: the plain reference is slow on a CPU.
DEFAULT_COUNTS = {"cuda": "4194304,100000000", "cpu": "262144,16777216"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure operators and codecs, print the tables, write JSON and an HTML page."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.codecs", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file; the page is written beside it")
    parser.add_argument("--counts", help="numbers of values for the operators, '' for none; 4194304,100000000 on CUDA")
    parser.add_argument("--shapes", help="matrices for the codecs; 128x128,512x512,2048x2048,10000x10000")
    parser.add_argument("--codecs", help="comma list of specs; all by default, '' for none")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds per measurement")
    parser.add_argument("--threads", type=int, help="CPU threads")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        check_device(options.device, option="--device ")
    except UsageError as error:
        parser.error(str(error))
    device = torch.device(options.device)
    text = DEFAULT_COUNTS[device.type] if options.counts is None else options.counts
    counts = [int(count) for count in text.split(",") if count]
    shapes = [_shape(shape) for shape in options.shapes.split(",")] if options.shapes else None
    result: dict[str, Any] = {"environment": environment(device), "operators": []}
    for count in counts:
        result["operators"] += operators.speed(device, count, budget_s=options.budget)
    if device.type == "cuda" and counts:
        result["variants"] = operators.variants(device, max(counts), budget_s=options.budget / 2)
        result["many_small"] = operators.many_small(device)
    if options.codecs != "":
        names = split(options.codecs) if options.codecs else None
        progress = partial(print, file=sys.stderr)
        result |= measure(device, names=names, shapes=shapes, budget_s=options.budget, progress=progress)
        print(text_table(*tabulate(COLUMNS, result["rows"])))
    for trial in result.get("variants", []):
        print(trial["operator"].ljust(16), "  ".join(f"{k} {v:.4f}" for k, v in trial["ms"].items()))
    if "many_small" in result:
        print("many small tensors:", result["many_small"])
    if result["operators"]:
        print(operator_table(result["operators"]))
    if options.out:
        write_json(result, options.out)
        if "rows" in result:
            write_text(page(result), options.out.with_suffix(".html"))
    return 0


def _shape(text: str) -> tuple[int, int]:
    rows, columns = (int(part) for part in text.split("x"))
    return rows, columns
