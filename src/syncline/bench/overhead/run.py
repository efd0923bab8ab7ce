"""`bench overhead`: host time and memory of an attached model against DDP, without a network limit.

Two ranks on this machine (on one GPU: as two hosts, which is what NCCL accepts) train the same model alone, under DDP
and attached, in blocks of steps that alternate. Every ratio compares two blocks of the same round.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from syncline import codecs
from syncline.bench.output import write_json
from syncline.bench.overhead import never_slower
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
    against = "instead: the best DDP on the CPU, on several networks, with the first steps; about 18 minutes"
    commands.add_argument("--never-slower", action="store_true", help=against)
    commands.add_argument("--quick", action="store_true", help="with --never-slower: two small cells")
    given = commands.parse_args(arguments)
    if not given.never_slower:
        return run_command(commands, arguments, _options_of_command, measure, table)
    try:
        result = never_slower.measure(quick=given.quick, progress=partial(print, file=sys.stderr))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    print(text_table(*never_slower.table(result)))
    print("\n".join(result["warnings"]))
    if given.out is not None:
        write_json(result, given.out)
    return 0


def _options_of_command(*, never_slower: bool, quick: bool, **asked: Any) -> Options:
    if quick:
        raise UsageError("--quick is for --never-slower: use fewer --blocks and --steps")
    return options(**asked)
