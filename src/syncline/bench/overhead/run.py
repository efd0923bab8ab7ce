"""`bench overhead`: host time and memory of an attached model against DDP, without a network limit.

Two ranks on this machine (on one GPU: as two hosts, which is what NCCL accepts) train the same model alone, under DDP
and attached, in blocks of steps that alternate. Every ratio compares two blocks of the same round.
"""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from syncline import codecs
from syncline.bench.output import markdown_table, read_result, write_between, write_json
from syncline.bench.overhead import gpu_claims, never_slower
from syncline.bench.overhead.rank import run_rank
from syncline.bench.overhead.rows import row, table
from syncline.bench.ranks import Progress, default_options, parser, ranks_started, result_of, run_command
from syncline.bench.training import Options
from syncline.errors import RankFailure, UsageError
from syncline.report.figures import text_table
from syncline.spec import split

CODECS = ("bf16", "powersgd(rank=4)")


def options(device: str, names: Sequence[str] | None = None, **asked: Any) -> Options:
    """What to measure: alone, DDP, attached dense and with each codec. None leaves a default."""
    chosen = CODECS if names is None else names
    for name in chosen:
        codecs.build(name)
    return default_options(device, ["alone", "ddp", "syncline", *(f"syncline({name})" for name in chosen)], asked)


def measure(options: Options, *, progress: Progress = print) -> dict[str, Any]:
    """Start the ranks, and make one row for each way."""
    with ranks_started(run_rank, options, progress) as (records, _, busy):
        rows = [row(name, records) for name in options.ways]
    result = result_of(
        "overhead",
        options,
        rows,
        busy=busy,
        tensors=records[0]["tensors"],
        gradient_bytes=records[0]["gradient_bytes"],
        repetitions=f"{options.blocks} blocks of {options.steps} steps in turn, on each of {options.ranks} ranks",
    )
    for line in rows:
        if not 1e-3 < line["loss"] < math.inf:
            result["warnings"].append(f"{line['way']}: with a loss of {line['loss']:g} the gradients are not typical")
        if line.get("kept_busy", 1.0) < 0.9:
            result["warnings"].append(f"{line['way']}: the device was idle while steps were issued")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m syncline.bench.overhead`."""
    commands = parser("overhead", __doc__)
    what = "comma list of specs to attach with; default: bf16 and powersgd"
    commands.add_argument("--codecs", dest="names", metavar="CODECS", type=split, help=what)
    against = "instead: the best DDP on several networks; CPU: also the first steps, 50 minutes; CUDA: 8 minutes"
    commands.add_argument("--never-slower", action="store_true", help=against)
    commands.add_argument("--quick", action="store_true", help="with --never-slower: three small cells")
    part = "with --never-slower: only cells whose label contains this text (1Gbit); --out keeps the others it has"
    commands.add_argument("--only", default="", help=part)
    commands.add_argument("--page", type=Path, help="with --never-slower: a page to write the table into")
    commands.add_argument("--show", type=Path, help="with --never-slower: measure nothing, show an earlier JSON file")
    given = commands.parse_args(arguments)
    if not given.never_slower:
        return run_command(commands, arguments, _options_of_command, measure, table)
    progress = partial(print, file=sys.stderr, flush=True)
    try:
        if given.show is not None:
            result = read_result(given.show)
        elif given.device == "cuda":
            result = gpu_claims.measure(
                gpu_claims.chosen(given.model, given.bandwidth),
                progress=progress,
                before=json.loads(given.out.read_text()) if given.out is not None and given.out.exists() else None,
                save=partial(write_json, path=given.out) if given.out is not None else lambda _: None,
            )
        else:
            result = claims_measured(given.out, quick=given.quick, only=given.only, progress=progress)
    except UsageError as error:
        commands.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    cuda = given.device == "cuda"
    shown = (gpu_claims if cuda else never_slower).table(result)
    print(text_table(*shown))
    print("\n".join(result["warnings"]))
    if given.page is not None and cuda:
        write_between(given.page, "never-slower-gpu", gpu_claims.markdown(result))
    elif given.page is not None:
        write_between(given.page, "never-slower", markdown_table(*shown))
    return 0


def claims_measured(out: Path | None, *, quick: bool, only: str, progress: Progress) -> dict[str, Any]:
    """`never_slower.measure` with its file, which is written after each cell and keeps cells that `only` excludes."""
    before = json.loads(out.read_text()) if out is not None and out.exists() else None
    save = (lambda result: None) if out is None else partial(write_json, path=out)
    return never_slower.measure(quick=quick, only=only, before=before, progress=progress, save=save)


def _options_of_command(
    *, never_slower: bool, quick: bool, only: str, page: Path | None, show: Path | None, **asked: Any
) -> Options:
    if quick or only or page or show:
        raise UsageError("--quick, --only, --page and --show are for --never-slower: use fewer --blocks and --steps")
    return options(**asked)
