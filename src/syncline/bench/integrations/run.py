"""`bench integrations`: runs both parts on emulated nodes, as a function and as a command line."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline._compat.groups import FileStore
from syncline.bench.integrations import fsdp, trainer
from syncline.bench.integrations.rows import fsdp_rows, table, trainer_rows
from syncline.bench.output import environment, write_json
from syncline.bench.ranks import Progress, busy_warnings
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, Report, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError, unknown
from syncline.report.figures import text_table
from syncline.trace.record.cpu_time import available_cores
from syncline.train.session.machine import busy_share

PARTS = ("fsdp", "trainer")
TOKENS = (8, 64)
"""Words of a rank's sequence: with more of them, a step has more compute for the same bytes."""
NETWORKS = ("200Mbit", "")
"""The networks of the Trainer; empty: links without a limit."""
_TIMEOUT_S = 300.0


def measure(parts: Sequence[str] = PARTS, *, quick: bool = False, progress: Progress = print) -> dict[str, Any]:
    """Measure FSDP2 and the Trainer; `quick` runs tiny models for seconds."""
    for part in parts:
        if part not in PARTS:
            raise unknown("part", part, PARTS)
    busy = busy_share(0.2 if quick else 1.0)
    sharded, tuned = fsdp.Options(), trainer.Options()
    if quick:
        sharded = replace(sharded, layers=1, width=32, rounds=1, steps=1, codecs=("powersgd(rank=4)",))
        tuned = replace(tuned, width=16, layers=1, rounds=1, steps=2)
    rows: list[dict[str, Any]] = []
    warm_up()
    for tokens in TOKENS if "fsdp" in parts else ():
        progress(f"FSDP2, {tokens} words")
        options = replace(sharded, tokens=tokens)
        records = _on_nodes(fsdp.rank_main, options, options.bandwidth, fsdp.PER_NODE, progress)
        rows += fsdp_rows(records, options)
    for network in NETWORKS if "trainer" in parts else ():
        progress(f"Trainer, {network or 'links without a limit'}")
        records = _on_nodes(trainer.rank_main, tuned, network, 1, progress)
        rows += trainer_rows(records, tuned, network)
    return {
        "environment": environment(torch.device("cpu")) | {"cores": available_cores(), "busy_before": round(busy, 3)},
        "command": f"python -m syncline.bench.integrations --parts {','.join(parts)}{' --quick' * quick}",
        "setting": {"fsdp": asdict(sharded), "trainer": asdict(tuned)},
        "warnings": busy_warnings(busy),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write JSON where asked; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.integrations", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="fsdp, trainer, or both")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that all works")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args(arguments)
    try:
        result = measure(given.parts.split(","), quick=given.quick, progress=partial(print, file=sys.stderr))
    except UsageError as error:
        parser.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    print(text_table(*table(result)))
    print("\n".join(result["warnings"]))
    if given.out is not None:
        write_json(result, given.out)
    return 0


def _on_nodes(
    function: Callable[[Place, Any, Report], Any], options: Any, bandwidth: str, per_node: int, progress: Progress
) -> list[Any]:
    """The results of all ranks of two nodes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        nodes = stack.enter_context(Cluster(2, bandwidth=bandwidth or None)).nodes
        world = 2 * per_node
        places = [
            Place(
                rank,
                world,
                rank % per_node,
                rank // per_node,
                nodes[rank // per_node].netns,
                environment={"GLOO_SOCKET_IFNAME": nodes[0].interface},
            )
            for rank in range(world)
        ]
        payload = (function, options, str(folder / "rendezvous"))
        return run_ranks(
            _joined, places, payload, logs=folder, on_message=lambda rank, text: progress(text) if rank == 0 else None
        )


def _joined(place: Place, payload: tuple[Callable[..., Any], Any, str], report: Report) -> Any:
    """One rank: join the others, measure, leave."""
    function, options, path = payload
    dist.init_process_group(
        "gloo", store=FileStore(path, place.world_size), rank=place.rank, world_size=place.world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )  # fmt: skip
    try:
        return function(place, options, report)
    finally:
        dist.destroy_process_group()
