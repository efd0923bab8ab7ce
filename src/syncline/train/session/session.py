"""A session: the runs of one `train` or `compare`, one after the other, into one run folder.

Ranks are started here, on emulated nodes where asked and possible; a run that crashes becomes a row that says so, and
what was computed before it is kept.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import syncline
from syncline._compat import FileStore
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, Report, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError
from syncline.results.schema import SCHEMA, Results
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.train.checkpoint.resume import Resume, check_resumable, choose
from syncline.train.config import CHECKPOINTS, Config, Train
from syncline.train.rank.worker import Assignment, run_rank
from syncline.train.session.assemble import about_ranks, assemble, merged
from syncline.train.session.link_changes import Links, as_rows, parse_changes
from syncline.train.session.places import emulated, places, shared_gpu
from syncline.train.session.run_folder import RunFolder, busy_share, cores, environment
from syncline.train.strategies import load

_BUSY = 0.2


class Watcher(Protocol):
    """Told what happens; the CLI shows it as a progress bar or as plain lines."""

    def note(self, text: str) -> None: ...
    def begin(self, run: "Planned") -> None: ...
    def step(self, message: dict[str, Any]) -> None: ...
    def end(self, run: "Planned", result: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Planned:
    """One strategy at one world size."""

    strategy: str
    workers: int
    servers: int
    train: Train


def plan_runs(config: Config, *, world_size: int, fixed: bool = False) -> list[Planned]:
    """Every run of the session, checked before the first one starts.

    With a `fixed` world size (a launcher's) aggregators are taken out of it, else they come on top.
    """
    _check_numbers(config.train)
    parse_changes(config)
    if not config.compare.strategies:
        raise UsageError("no strategy was named: for example --strategies single,all-reduce,ddp")
    sizes = config.compare.scale or (world_size,)
    if min(sizes) < 1:
        raise UsageError(f"a world size must be at least 1, not {min(sizes)}")
    runs = [_plan(config, name, size, fixed=fixed) for name in config.compare.strategies for size in sizes]
    return list(dict.fromkeys(runs))


def _check_numbers(train: Train) -> None:
    for key in ("batch", "epochs"):
        if getattr(train, key) < 1:
            raise UsageError(f"--{key} must be at least 1, not {getattr(train, key)}")
    if train.steps < 0:
        raise UsageError(f"--steps must be at least 1 (or 0 for the whole data set), not {train.steps}")
    for key in ("threads", "test_samples", "checkpoint_every"):
        if getattr(train, key) < 0:
            raise UsageError(f"train.{key} must be 0 or more, not {getattr(train, key)}")
    if not 0 <= train.seed < 2**31:
        raise UsageError(f"--seed must be 0 to {2**31 - 1}, not {train.seed}")
    if not 0 < train.timeout_s < 1e7:
        raise UsageError(f"train.timeout_s must be a positive number of seconds, not {train.timeout_s}")


def _plan(config: Config, name: str, size: int, *, fixed: bool) -> Planned:
    strategy, train = load(name), config.train
    if config.compare.scale and config.compare.scale_batch:
        growth, rest = divmod(size, min(config.compare.scale))
        if rest:
            smallest = min(config.compare.scale)
            raise UsageError(
                f"with scale_batch every world size is a multiple of the smallest: {size} is not of {smallest}"
            )
        train = replace(train, batch=train.batch * growth, steps=-(-train.steps // growth))
    workers = 1 if strategy.alone else size - strategy.servers if fixed else size
    if workers < 1:
        raise UsageError(f"'{name}' needs more than its {strategy.servers} aggregators: start more ranks")
    if not strategy.alone and size == 1 and not config.compare.scale:
        raise UsageError(f"'{name}' synchronises at least two ranks: use --nproc 2 or more, or the strategy 'single'")
    if train.batch % workers:
        below = train.batch // workers * workers or workers
        raise UsageError(f"a batch of {train.batch} does not divide over {workers} workers: use --batch {below}")
    # One rank has nobody to synchronise with: at world size 1 every strategy is plain training.
    return Planned(name, workers, strategy.servers if size > 1 else 0, train)


def ranks_asked(config: Config) -> int:
    """How many ranks train on this machine."""
    nodes, nproc = config.cluster.nodes, config.cluster.nproc or config.cluster.nodes or 4
    if min(nodes, nproc, config.cluster.nproc) < 0:
        raise UsageError("--nproc and --nodes must be positive")
    if nodes and nproc % nodes:
        raise UsageError(
            f"{nproc} ranks do not divide over {nodes} nodes: use --nproc {max(1, nproc // nodes) * nodes}"
        )
    return nproc


def run_session(
    config: Config, *, out: Path | None, watcher: Watcher, resume: Path | None = None
) -> tuple[Path, Results]:
    """Run everything on this machine, or go on with the run in `resume`; returns the run folder and the results."""
    nodes = config.cluster.nodes
    runs = plan_runs(config, world_size=ranks_asked(config))
    check_resumable(config, resumed=resume is not None)
    chosen = None if resume is None else choose(resume, config, workers=runs[0].workers)
    for size in config.compare.scale if nodes else ():
        if size > nodes and size % nodes:
            raise UsageError(f"{size} ranks do not divide over {nodes} nodes: leave {size} out of --scale")
    with emulated(config, servers=max(run.servers for run in runs)) as (cluster, note):
        folder = RunFolder(out, label=config.train.model) if chosen is None else RunFolder.reopen(chosen.run)
        results = start_results(config, folder, cluster=cluster, note=note, resume=chosen)
        for text in results["warnings"]:
            watcher.note(text)
        warm_up()
        several = len(config.compare.scale) > 1
        for run in runs:
            watcher.begin(run)
            path = folder.strategy(run.strategy, world_size=run.workers, several=several)
            try:
                result = _run(run, config, path, cluster=cluster, watcher=watcher, resume=chosen)
            except UsageError:
                if not results["runs"]:
                    folder.discard()
                raise
            add_result(results, result, folder)
            watcher.end(run, result)
    return folder.path, results


def add_result(results: Results, result: dict[str, Any], folder: RunFolder) -> None:
    """File a run and save, so that nothing that was computed can be lost."""
    dropped = result.pop("spans_dropped", 0)
    if dropped:
        results["warnings"].append(
            f"{result['strategy']}: the recorder was full, {dropped} early spans are not in its trace nor its shares"
        )
    results["runs"].append(result)  # type: ignore[arg-type]
    folder.save(results)


def start_results(
    config: Config, folder: RunFolder, *, cluster: Cluster | None, note: str | None, resume: Resume | None = None
) -> Results:
    """The results without runs, saved, with the warnings that hold for all of them."""
    facts = environment()
    folder.describe(config, facts)
    changes = parse_changes(config) if cluster is not None else ()
    changing = [f"the links change during each run: {', '.join(change.text for change in changes)}"] if changes else []
    results: Results = {
        "schema": SCHEMA,
        "syncline": syncline.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "title": config.title or f"{config.train.model}: {', '.join(config.compare.strategies)}",
        "config": config.as_dict(),
        "environment": facts,
        "network": {
            "emulated": cluster is not None,
            "nodes": config.cluster.nodes if cluster is not None else 1,
            "bandwidth": cluster.bandwidth if cluster is not None else None,
            "note": note,
        },
        "warnings": [*([note] if note else []), *changing, *(resume.warnings if resume else ())],
        "runs": [],
    }
    if changes:
        results["network"]["changes"] = as_rows(changes)
    busy = busy_share()
    if busy > _BUSY:
        results["warnings"].append(
            f"other programs take {busy:.0%} of this machine: times are longer than they should be, and unevenly so"
        )
    if not folder.reopened:
        folder.save(results)
    return results


def _run(
    run: Planned, config: Config, folder: Path, *, cluster: Cluster | None, watcher: Watcher, resume: Resume | None
) -> dict[str, Any]:
    first_step = 0 if resume is None else resume.step
    links = Links(cluster, config)
    links.begin(first_step)
    assignment = Assignment(
        strategy=run.strategy,
        train=run.train,
        workers=run.workers,
        servers=run.servers,
        folder=str(folder),
        # The counters are a node's: with several ranks on it they are nobody's alone.
        count_wire=cluster is not None and 1 < run.workers <= config.cluster.nodes,
        cores=cores(),
        launched_ns=time.perf_counter_ns(),
        checkpoints=str(checkpoints_of(folder)),
        resume="" if resume is None else str(resume.checkpoint),
        first_step=first_step,
    )

    phases: dict[int, dict[str, float]] = {}

    def message(rank: int, content: dict[str, Any]) -> None:
        if content["phases"] is not None:
            phases[rank] = content["phases"]
        if rank == 0:
            links.reported(content["step"])
            watcher.step({**content, "ranks": dict(phases)})
            phases.clear()

    store = folder / "rendezvous"
    store.unlink(missing_ok=True)  # a process that was killed leaves its own
    try:
        with shared_gpu(config.train, run.workers + run.servers) as variables:
            where = places(config, workers=run.workers, servers=run.servers, cluster=cluster, variables=variables)
            records = run_ranks(_rank_main, where, (assignment, str(store)), logs=folder, on_message=message)
    except RankFailure as failure:
        return crashed(run, failure, folder) | links.row()
    finally:
        store.unlink(missing_ok=True)
    nodes = config.cluster.nodes if cluster is not None else 1
    # Links that changed have no one rate.
    rate = cluster.bandwidth if cluster is not None and not links.row() else None
    return finish(run, records, folder, nodes=nodes, bandwidth=rate) | links.row()


def checkpoints_of(folder: Path) -> Path:
    """Where the run whose logs are in `folder`, `RUN/runs/<strategy>`, keeps its checkpoints."""
    return folder.absolute().parent.parent / CHECKPOINTS


def _rank_main(place: Place, payload: tuple[Assignment, str], report: Report) -> dict[str, Any]:
    assignment, store_path = payload
    # A store in a file opens no port, and nodes on one machine share the file system.
    store = FileStore(store_path, place.world_size)
    return run_rank(
        assignment, rank=place.rank, local_rank=place.local_rank, node=place.node, store=store, progress=report
    )


def finish(
    run: Planned, records: Sequence[dict[str, Any]], folder: Path, *, nodes: int, bandwidth: int | None = None
) -> dict[str, Any]:
    """Turn the ranks' records into a row of the results, and their spans into one trace."""
    trace = merged(records)
    metadata = {"strategy": run.strategy, "world_size": run.workers, "backend": records[0]["backend"]}
    metadata |= {"clock_error_ns": trace.clock_error_ns, "notes": trace.notes} | about_ranks(records)
    metadata |= {} if bandwidth is None else {"bandwidth": bandwidth}
    write_chrome_trace(replace(trace, metadata=metadata), folder / "trace.json.gz")
    result = assemble(run.strategy, records, trace.spans, batch=run.train.batch, nodes=min(nodes, run.workers))
    return result | {"spans_dropped": sum(record["spans_dropped"] for record in records)}


def crashed(run: Planned, failure: RankFailure, folder: Path) -> dict[str, Any]:
    """The row of a run that failed, with the steps that rank 0 had logged."""
    result: dict[str, Any] = {
        "strategy": run.strategy,
        "status": "crashed",
        "error": {"rank": failure.rank, "summary": failure.summary, "traceback": failure.traceback},
        "world_size": run.workers,
        "servers": run.servers,
        "batch": run.train.batch,
    }
    log = folder / "rank0.steps.jsonl"
    if log.exists():
        rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        result["loss"] = [row["loss"] for row in rows]
        result["step_ms_series"] = [row["step_ms"] for row in rows]
    return result
