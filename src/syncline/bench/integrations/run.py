"""`bench integrations`: runs its parts on emulated nodes, as a function and as a command line."""

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
from syncline.bench.integrations.rows import fsdp_losses, fsdp_rows, loss_table, table, trainer_rows
from syncline.bench.output import environment, write_json
from syncline.bench.ranks import Progress, busy_warnings
from syncline.cluster.gpu import mps_daemon, rank_environment
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, Report, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError, unknown
from syncline.report.figures import text_table
from syncline.trace.record.cpu_time import available_cores
from syncline.train.rank.join import check_device
from syncline.train.session.machine import busy_share

PARTS = ("fsdp", "fsdp-loss", "trainer")
TOKENS = (8, 64)
"""Words of a rank's sequence: with more of them, a step has more compute for the same bytes."""
NETWORKS = ("200Mbit", "")
"""The networks of the Trainer; empty: links without a limit."""
_TIMEOUT_S = 300.0


def measure(
    parts: Sequence[str] = PARTS,
    *,
    device: str = "cpu",
    tokens: Sequence[int] = TOKENS,
    quick: bool = False,
    progress: Progress = print,
) -> dict[str, Any]:
    """Measure FSDP2 (on a GPU with `device="cuda"`) and the Trainer; `quick` runs tiny models for seconds."""
    for part in parts:
        if part not in PARTS:
            raise unknown("part", part, PARTS)
    if min(tokens) < 1:
        raise UsageError(f"--tokens {min(tokens)}: a sequence has one word or more")
    check_device(device, option="--device ")
    busy = busy_share(0.2 if quick else 1.0)
    threads = max(1, available_cores() // (2 * fsdp.PER_NODE))
    sharded, tuned = fsdp.Options(device=device, threads=threads), trainer.Options()
    if quick:
        sharded = replace(sharded, layers=1, width=32, rounds=1, steps=1, codecs=("powersgd(rank=4)",))
        sharded = replace(sharded, loss_steps=2, loss_seeds=(0,))
        tuned = replace(tuned, width=16, layers=1, rounds=1, steps=2)
    rows: list[dict[str, Any]] = []
    warm_up()
    for number in tokens if "fsdp" in parts else ():
        progress(f"FSDP2, {number} words")
        options = replace(sharded, tokens=number)
        records = _on_nodes(fsdp.rank_main, options, options.bandwidth, fsdp.PER_NODE, progress, device=device)
        rows += fsdp_rows(records, options)
    losses: list[dict[str, Any]] = []
    if "fsdp-loss" in parts:
        progress(f"FSDP2, losses after {sharded.loss_steps} steps")
        options = replace(sharded, tokens=max(TOKENS))  # with few words, 40 steps teach nothing
        records = _on_nodes(fsdp.train_main, options, "", fsdp.PER_NODE, progress, device=device)
        losses = fsdp_losses(records, options)
    for network in NETWORKS if "trainer" in parts else ():
        progress(f"Trainer, {network or 'links without a limit'}")
        records = _on_nodes(trainer.rank_main, tuned, network, 1, progress)
        rows += trainer_rows(records, tuned, network)
    return {
        "environment": environment(torch.device(device)) | {"cores": available_cores(), "busy_before": round(busy, 3)},
        "command": f"python -m syncline.bench.integrations --parts {','.join(parts)} --device {device} --tokens"
        f" {' '.join(map(str, tokens))}{' --quick' * quick}",
        "setting": {"fsdp": asdict(sharded), "trainer": asdict(tuned)},
        "warnings": busy_warnings(busy),
        "rows": rows,
        "losses": losses,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write JSON where asked; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.integrations", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of FSDP2; the Trainer uses the CPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="words of a rank's sequence with FSDP2")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that all works")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args(arguments)
    try:
        progress = partial(print, file=sys.stderr)
        how = {"device": given.device, "tokens": given.tokens, "quick": given.quick}
        result = measure(given.parts.split(","), **how, progress=progress)
    except UsageError as error:
        parser.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    for lines in (table(result), loss_table(result)):
        if lines[1]:
            print(text_table(*lines))
    print("\n".join(result["warnings"]))
    if given.out is not None:
        write_json(result, given.out)
    return 0


def _on_nodes(
    function: Callable[[Place, Any, Report], Any],
    options: Any,
    bandwidth: str,
    per_node: int,
    progress: Progress,
    *,
    device: str = "cpu",
) -> list[Any]:
    """The results of all ranks of two nodes. On CUDA they share the first GPU."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        nodes = stack.enter_context(Cluster(2, bandwidth=bandwidth or None)).nodes
        world = 2 * per_node
        shared = stack.enter_context(mps_daemon()) if device == "cuda" else {}
        places = []
        for rank in range(world):
            node = nodes[rank // per_node]
            own = {"GLOO_SOCKET_IFNAME": node.interface}
            if device == "cuda":
                own |= {**shared, **rank_environment(rank, node, ranks_on_gpu=world)}
            places.append(Place(rank, world, rank % per_node, node.index, node.netns, environment=own))
        payload = (function, options, str(folder / "rendezvous"), device)
        return run_ranks(
            _joined, places, payload, logs=folder, on_message=lambda rank, text: progress(text) if rank == 0 else None
        )


def _joined(place: Place, payload: tuple[Callable[..., Any], Any, str, str], report: Report) -> Any:
    """One rank: join the others, measure, leave."""
    function, options, path, device = payload
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=FileStore(path, place.world_size), rank=place.rank,
        world_size=place.world_size, timeout=timedelta(seconds=_TIMEOUT_S),
    )  # fmt: skip
    try:
        return function(place, options, report)
    finally:
        dist.destroy_process_group()
