"""`bench recorder`: the cost of recording, and the error of the sum of phases against wall time.

Two ranks on this machine train the same model under DDP and attached, with the recorder on and off in alternating
blocks of the same processes; a ratio compares two blocks of one round. First every step is recorded, then each
n-th step (in blocks of at least n), as the recorder chooses by default: the bound of 1% is for that. Wall time is read
from the host's clock around each block, not from the recorder. On a machine whose noise is above 1%, the ratio of
recorded steps to their neighbours within one recording says more; it does not include the cost in the steps between.
"""

from collections.abc import Sequence
from typing import Any

from syncline.bench.ranks import Progress, default_options, parser, ranks_started, result_of, run_command
from syncline.bench.recorder.rank import LEAD, run_rank, trace_file
from syncline.bench.recorder.rows import MAX_COST, MAX_ERROR, row, table, warnings
from syncline.bench.training import Options
from syncline.trace.analysis.timeline import partition
from syncline.trace.formats.chrome_read import read_chrome_trace

WAYS = ("ddp", "syncline")
_BLOCKS = {"cpu": {"blocks": 8, "steps": 8}, "cuda": {"blocks": 5, "steps": 6}}


def options(device: str, **asked: Any) -> Options:
    """What to measure; None leaves a default."""
    return default_options(device, WAYS, asked, **_BLOCKS[device])


def measure(options: Options, *, progress: Progress = print) -> dict[str, Any]:
    """Start the ranks, and make one row for each way."""
    with ranks_started(run_rank, options, progress) as (records, folder, busy):
        rows = [row(name, records, _traces(options, str(folder), name)) for name in options.ways]
    result = result_of(
        "recorder",
        options,
        rows,
        busy=busy,
        tensors=records[0]["tensors"],
        repetitions=f"{options.blocks} rounds of {options.steps} steps on and off, the mean of {options.ranks} ranks;"
        " sampled: see the rows",
        bounds={"ratio": 1 + MAX_COST, "partition_error": MAX_ERROR},
    )
    result["warnings"] += [text for line in rows for text in warnings(line)]
    return result


def _traces(options: Options, folder: str, name: str) -> list[dict[str, Any]]:
    """For each block: facts of its recorder, and by rank the sum of phases in milliseconds per counted step."""
    found = []
    for number in range(options.blocks):
        again = read_chrome_trace(trace_file(folder, name, number))
        sums = {}
        for rank in range(options.ranks):
            steps = partition(s for s in again.spans if s.rank == rank)
            counted = [sum(phases.values()) for step, phases in steps.items() if step >= LEAD[options.device]]
            if len(counted) == options.steps:
                sums[rank] = sum(counted) / len(counted) / 1e6
        found.append({"recorder": again.metadata["recorder"], "ms": sums})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m syncline.bench.recorder`."""
    return run_command(parser("recorder", __doc__), arguments, options, measure, table)
