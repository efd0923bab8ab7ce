"""A session on this machine: starts the ranks of each run, on emulated nodes where asked, and collects their records.

A run that crashes becomes a row that says so; the results of the runs before it are kept.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline._compat.groups import FileStore
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, Report, run_ranks, warm_up
from syncline.errors import DamagedCheckpoint, RankFailure, UsageError
from syncline.results.schema import Results
from syncline.trace.record.cpu_time import available_cores
from syncline.train.checkpoint.resume import Resume, check_resumable, choose
from syncline.train.config import Config
from syncline.train.rank.record import RankRecord
from syncline.train.rank.worker import Assignment, RunSpec, run_rank
from syncline.train.session.link_changes import LinkSchedule
from syncline.train.session.memory import check_memory
from syncline.train.session.output import SessionOutput, Watcher
from syncline.train.session.placement import emulated_cluster, place_ranks, shared_gpu_environment
from syncline.train.session.runs import list_runs, local_world_size


def run_local(
    config: Config, *, out: Path | None, watcher: Watcher, resume: Path | None = None
) -> tuple[Path, Results]:
    """Run the session, or resume the run in the folder `resume`; returns the run folder and the results."""
    damaged: dict[Path, str] = {}
    while True:
        try:
            return _session(config, out=out, watcher=watcher, resume=resume, damaged=damaged)
        except _CannotResume as error:
            damaged[error.checkpoint] = str(error)


class _CannotResume(Exception):
    """The ranks cannot load a checkpoint, which seemed undamaged; the message says why."""

    def __init__(self, checkpoint: Path, why: str) -> None:
        super().__init__(why)
        self.checkpoint = checkpoint


def _session(
    config: Config, *, out: Path | None, watcher: Watcher, resume: Path | None, damaged: Mapping[Path, str]
) -> tuple[Path, Results]:
    nodes = config.cluster.nodes
    runs = list_runs(config, world_size=local_world_size(config), resumed=resume is not None)
    check_resumable(config, resumed=resume is not None)
    chosen = None if resume is None else choose(resume, config, workers=runs[0].workers, damaged=damaged)
    for size in config.compare.scale if nodes else ():
        if size > nodes and size % nodes:
            raise UsageError(f"{size} ranks do not divide over {nodes} nodes: leave {size} out of --scale")
    check_memory(config, runs)
    with emulated_cluster(config, servers=max(run.servers for run in runs)) as (cluster, note):
        output = SessionOutput(config, out=out, watcher=watcher, cluster=cluster, note=note, resume=chosen)
        warm_up()
        for run in runs:
            folder = output.begin(run)
            links = LinkSchedule(cluster, config, first_step=0 if chosen is None else chosen.step)
            try:
                ended = _run(run, config, folder, cluster=cluster, links=links, watcher=watcher, resume=chosen)
            except UsageError as error:
                output.discard_if_empty()
                if chosen is not None and isinstance(error, DamagedCheckpoint):
                    raise _CannotResume(chosen.checkpoint, str(error)) from error
                raise
            output.end(run, folder, ended, nodes=nodes if cluster is not None else 1, link_changes=links.applied)
    return output.folder.path, output.results


def _run(
    run: RunSpec,
    config: Config,
    folder: Path,
    *,
    cluster: Cluster | None,
    links: LinkSchedule,
    watcher: Watcher,
    resume: Resume | None,
) -> list[RankRecord] | RankFailure:
    """Run one strategy; returns its ranks' records, or the failure of the first one that failed."""
    assignment = Assignment(
        run=run,
        folder=folder,
        # The counters are per node: with several ranks on a node they cannot be attributed to one.
        count_network=cluster is not None and 1 < run.workers <= config.cluster.nodes,
        cores=available_cores(),
        launched_ns=time.perf_counter_ns(),
        resume=resume,
    )
    phases: dict[int, dict[str, float]] = {}

    def on_message(rank: int, content: dict[str, Any]) -> None:
        if content["phases"] is not None:
            phases[rank] = content["phases"]
        if "line" in content:
            watcher.log(content["line"])
        if rank == 0:
            links.step_done(content["step"])
            watcher.step({**content, "ranks": dict(phases)})
            phases.clear()

    store = folder / "rendezvous"
    store.unlink(missing_ok=True)  # a killed process may have left one
    try:
        with shared_gpu_environment(config.train, run.ranks) as variables:
            places = place_ranks(config, run, cluster=cluster, variables=variables)
            reports = run_ranks(_rank_main, places, (assignment, str(store)), logs=folder, on_message=on_message)
    except RankFailure as failure:
        return failure
    finally:
        store.unlink(missing_ok=True)
    return [RankRecord.from_json(report) for report in reports]


def _rank_main(place: Place, payload: tuple[Assignment, str], report: Report) -> str:
    """The main function of a rank process; returns its record as JSON."""
    assignment, store_path = payload
    # A store in a file needs no port, and nodes on one machine share the file system.
    store = FileStore(store_path, place.world_size)
    return run_rank(assignment, place, store=store, progress=report).to_json()
