"""`bench overlap`: compute alone, DDP at its best and the engine, interleaved turn by turn on the same nodes.

All contestants are started at once; then one at a time trains for a few seconds, round after round. The result has step
times, ratios to the rivals within a round, and ratios to the bound max(compute, network).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from syncline.bench.overlap.ablation import CODEC, ablation
from syncline.bench.overlap.contestants import Contest
from syncline.bench.overlap.rounds import Rounds, Turns
from syncline.bench.overlap.table import page
from syncline.bench.ranks import Progress, busy_warnings
from syncline.cluster.measure import measure_bandwidth
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, warm_up
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.plan.cache import VARIABLE
from syncline.results.file import strict
from syncline.spec import parse, show
from syncline.trace.record.cpu_time import available_cores
from syncline.train.config import Config
from syncline.train.rank.worker import RunSpec
from syncline.train.session.machine import busy_share, environment
from syncline.train.session.memory import check_memory
from syncline.train.session.placement import emulated_cluster, place_ranks, shared_gpu_environment
from syncline.train.session.run_folder import RunFolder
from syncline.train.session.runs import list_runs, local_world_size

__all__ = ["BUCKETS", "CODEC", "COMPRESS", "ablation", "all_rivals", "contestants", "measure", "save"]

SCHEMA = 1
COMPRESS = "powersgd(rank=64)"
BUCKETS = (5.0, 25.0)
FOLDER = Path("runs") / "bench-overlap"
_DDP_BUCKET = 25.0
_PATIENCE_S = 600.0
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# An H200 had room for 11 ranks of 32 channels and for 24 ranks of 16, so some remain free.
_CHANNELS, _FEWEST = 256, 2


def contestants(compress: str, *, buckets: Iterable[float] = BUCKETS, also: Iterable[str] = ()) -> tuple[str, ...]:
    """Compute alone, DDP dense and with its own compression at every bucket size, and the engine.

    >>> contestants("powersgd(rank=64)", buckets=[25])[:4]
    ('local', 'ddp', 'ddp-bf16', 'ddp-powersgd(rank=64)')
    """
    chain = parse(compress)
    kinds: list[tuple[str, list[str]]] = [("ddp", []), ("ddp-bf16", [])]
    if chain[0].name == "powersgd":
        rank = chain[0].kwargs.get("rank", *chain[0].args[:1]) or 4
        kinds.append(("ddp-powersgd", [f"rank={rank}"]))
    found = ["local"]
    for name, arguments in kinds:
        for size in buckets:
            found.append(_spec(name, *arguments, "" if size == _DDP_BUCKET else f"bucket_mb={size:g}"))
    ours = ["syncline", f"syncline({show(chain)})", *(f"syncline({spec})" for spec in also), "syncline(auto)"]
    return tuple(dict.fromkeys([*found, *ours]))


def all_rivals() -> tuple[str, ...]:
    """Every rival: torch's DDP, dense and compressed, at its best settings, and other published systems.

    The fastest of a kind counts, so DDP runs with several bucket sizes and options.
    """
    sizes = ("bucket_mb=5", "", "bucket_mb=100")
    dense = [_spec(name, size) for name in ("ddp", "ddp-bf16") for size in sizes]
    low_rank = [_spec("ddp-powersgd", f"rank={rank}", more) for rank in (1, 4, 64) for more in ("", "batch=true")]
    return (*dense, "ddp(static_graph=true)", *low_rank, "horovod", "byteps", "ring-dgc")


def _spec(name: str, *arguments: str) -> str:
    given = ", ".join(filter(None, arguments))
    return f"{name}({given})" if given else name


def measure(
    config: Config,
    turns: Turns,
    *,
    out: Path | None = None,
    progress: Progress = print,
    stages: Mapping[str, str] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run the contest of `config.compare.strategies`; returns its folder and the content of `overlap.json`.

    `stages`: the labels of an ablation and their strategies.
    """
    runs = _planned(config)
    check_memory(config, runs, together=True)
    with emulated_cluster(config) as (cluster, note):
        folder = RunFolder(out or FOLDER, label="overlap")
        result = _started(config, turns, folder, cluster, note)
        result["stages"] = dict(stages or {})
        for text in result["warnings"]:
            progress(f"note: {text}")
        warm_up()
        try:
            _contest(config, turns, runs, folder, cluster, result, progress)
        except UsageError:
            if not result["rows"]:
                folder.discard()
            raise
    return folder.path, result


def _contest(
    config: Config,
    turns: Turns,
    runs: Sequence[RunSpec],
    folder: RunFolder,
    cluster: Cluster | None,
    result: dict[str, Any],
    progress: Progress,
) -> None:
    with ExitStack() as stack:
        # One MPS daemon per contestant: a daemon has channels for few ranks, and a fault ends all of its ranks.
        shared = [stack.enter_context(shared_gpu_environment(config.train, run.workers)) for run in runs]
        contest = stack.enter_context(Contest(patience_s=_PATIENCE_S + 2 * config.train.timeout_s, progress=progress))
        progress(f"starting {len(runs)} contestants, {sum(run.workers for run in runs)} ranks ...")
        for run, variables in zip(runs, shared, strict=True):
            path = folder.strategy(run.strategy, world_size=run.workers, several=False)
            where = place_ranks(config, run, cluster=cluster, variables=variables)
            where = [_sharing_channels(place, sum(other.workers for other in runs)) for place in where]
            where = [replace(place, environment={**place.environment, VARIABLE: "off"}) for place in where]
            # Bytes are counted per node, for all its ranks; only one contestant trains at a time.
            contest.start(run, where, folder=path, count_wire=cluster is not None)
        contest.ready()
        try:
            Rounds(turns, contest, result, save=partial(save, result, folder.path), progress=progress).run()
        finally:
            # Keep all measurements, whatever ends the contest.
            save(result, folder.path)


def _sharing_channels(place: Place, ranks: int) -> Place:
    """Limit the CUDA connections of a rank: ranks keep theirs between turns, so those of all ranks have to fit."""
    asked = int(place.environment.get(_CONNECTIONS, "0"))
    fitting = str(max(_FEWEST, min(asked, _CHANNELS // ranks)))
    return replace(place, environment={**place.environment, _CONNECTIONS: fitting}) if asked else place


def save(result: dict[str, Any], folder: Path) -> None:
    """Write `overlap.json` and `overlap.html` atomically."""
    write_text(json.dumps(strict(result), indent=1, allow_nan=False) + "\n", folder / "overlap.json")
    write_text(page(result), folder / "overlap.html")


def _planned(config: Config) -> list[RunSpec]:
    """All contestants, checked before anything starts."""
    if config.compare.scale:
        raise UsageError("bench overlap runs at one world size: leave compare.scale out")
    if config.cluster.changes:
        raise UsageError("bench overlap does not change its links: leave cluster.changes out")
    runs = list_runs(config, world_size=local_world_size(config))
    for run in runs:
        if run.servers:
            raise UsageError(
                f"'{run.strategy}' has aggregator ranks, which cannot take turns: leave it out, or use syncline compare"
            )
    return runs


def _started(
    config: Config, turns: Turns, folder: RunFolder, cluster: Cluster | None, note: str | None
) -> dict[str, Any]:
    """The result before the first turn, with the measured rate of the links."""
    facts, busy = environment(), busy_share(1.0)
    folder.describe(config, facts)
    linked = cluster if cluster is not None and len(cluster.nodes) > 1 else None
    shaped = linked and linked.bandwidth
    return {
        "schema": SCHEMA,
        # Not the title of the recipe: options may have replaced its model or its links.
        "title": f"Overlap: {config.train.model}" + (f" on links of {config.cluster.bandwidth}" if shaped else ""),
        "setting": {
            **{key: getattr(config.train, key) for key in ("model", "data", "batch", "optimizer", "seed")},
            "ranks": local_world_size(config),
            "nodes": config.cluster.nodes if cluster is not None else 0,
            "bandwidth": config.cluster.bandwidth,
            "device": "cuda" if facts["gpu"] and config.train.device != "cpu" else "cpu",
            "threads": config.train.threads or max(1, available_cores() // local_world_size(config)),
            **asdict(turns),
        },
        "environment": facts | {"busy_before": round(busy, 3)},
        "link": {"shaped_bits_per_s": shaped, "measured_bits_per_s": linked and measure_bandwidth(linked)},
        "warnings": [*([note] if note else []), *busy_warnings(busy)],
        "rounds_done": 0,
        "loss_step": 0,
        "rows": [],
        "pictured": [],
        "timelines": {},
    }
