"""A session whose ranks are already running (torchrun, `syncline cluster`, Slurm): this process is one of them.

Every strategy is run by a child process of each rank, in its own process group over the launcher's store. A child that
fails closes its connections, so that its peers notice. The ranks exchange records and failures through the store and
start the next strategy together.
"""

import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from syncline._compat.groups import PrefixStore, Store, TCPStore, rendezvous
from syncline.cluster.ranks import Place, Report, is_peer_loss, run_ranks
from syncline.errors import DamagedCheckpoint, PeerError, RankFailure, UsageError
from syncline.results.schema import Results
from syncline.trace.record.cpu_time import available_cores
from syncline.train.checkpoint.resume import Resume, check_resumable, choose
from syncline.train.config import Config
from syncline.train.rank.record import RankRecord
from syncline.train.rank.worker import Assignment, RunSpec, run_rank
from syncline.train.session.meeting import Meeting
from syncline.train.session.output import SessionOutput, Watcher
from syncline.train.session.runs import list_runs


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def run_launched(
    config: Config, *, out: Path | None, watcher: Watcher, resume: Path | None = None
) -> tuple[Path, Results] | None:
    """Take part in every run; rank 0 returns the run folder and the results, the others None."""
    launcher = _Launcher.from_environment()
    if config.compare.scale:
        raise UsageError("--scale starts ranks itself: leave it out under torchrun, or run without torchrun")
    runs = list_runs(config, world_size=launcher.world_size, fixed=True, resumed=resume is not None)
    check_resumable(config, resumed=resume is not None)
    store = _join_store(launcher, timeout_s=config.train.timeout_s)
    size = {"rank": launcher.rank, "world_size": launcher.world_size}
    with Meeting(store, **size, timeout_s=config.train.timeout_s) as meeting:
        chosen = None if resume is None else _agree_on_checkpoint(meeting, resume, config, runs[0].workers, launcher)
        output = None
        if launcher.rank == 0:
            note = "--nodes has no effect here: the launcher decides on nodes and links"
            output = SessionOutput(
                config, out=out, watcher=watcher, note=note if config.cluster.nodes else None, resume=chosen
            )
            if "SYNCLINE_NODE" in os.environ:
                output.results["network"] |= {"emulated": True, "nodes": launcher.nodes}
        for number, run in enumerate(runs):
            _take_part(run, number, meeting=meeting, launcher=launcher, output=output, watcher=watcher, resume=chosen)
        meeting.leave()
    return None if output is None else (output.folder.path, output.results)


def _take_part(
    run: RunSpec,
    number: int,
    *,
    meeting: Meeting,
    launcher: "_Launcher",
    output: SessionOutput | None,
    watcher: Watcher,
    resume: Resume | None,
) -> None:
    """Run one strategy with all ranks; rank 0 saves its results. A lost rank ends the session with a `PeerError`."""
    store = PrefixStore(_prefix(number), meeting.store)
    meeting.say(f"run {number + 1}, {run.strategy}")
    if output is not None:
        made = output.begin(run)
        meeting.ask(lambda: store.set("folder", str(made.absolute())))
    folder = Path(meeting.wait_for("folder", store=store).decode())
    folder.mkdir(parents=True, exist_ok=True)
    ended: list[RankRecord] | RankFailure
    try:
        if launcher.rank < run.ranks:
            assignment = Assignment(
                run=run,
                folder=folder,
                count_network="SYNCLINE_NODE" in os.environ and run.workers > 1 and launcher.local_world_size == 1,
                cores=max(1, available_cores() * run.ranks // min(run.ranks, launcher.local_world_size)),
                launched_ns=time.perf_counter_ns(),
                resume=resume,
            )
            _run_child(assignment, number, store=store, meeting=meeting, launcher=launcher, watcher=watcher)
        meeting.say(f"waiting after run {number + 1}, {run.strategy}")
        meeting.barrier("done", store=store)
        if output is not None:
            ended = meeting.ask(lambda: _collect(run, store))
    except DamagedCheckpoint as error:
        if output is not None:
            output.discard_if_empty()
        assert resume is not None
        fix = f"name another one, --resume {resume.checkpoint.parent}/step-N"
        raise UsageError(f"checkpoint {resume.checkpoint.name} is damaged ({error}): {fix}") from None
    except UsageError:
        if output is not None:
            output.discard_if_empty()
        raise
    except PeerError as error:
        if output is not None:
            lost = min(error.ranks, default=launcher.rank)
            failure = RankFailure(str(error), rank=lost, summary=f"PeerError: {error}")
            output.end(run, folder, failure, nodes=launcher.nodes)
        meeting.let_rank_0_save(error)
        raise
    if output is not None:
        output.end(run, folder, ended, nodes=launcher.nodes)


@dataclass(frozen=True)
class _Launcher:
    """The launcher's environment variables."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "_Launcher":
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(f"RANK is set but not {', '.join(missing)}: start ranks with torchrun, or unset RANK")
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        except ValueError:
            raise UsageError("RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers") from None
        if not 0 <= rank < world_size:
            raise UsageError(f"RANK={rank} is outside WORLD_SIZE={world_size}")
        return cls(rank, world_size, *local)

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)


def _run_child(
    assignment: Assignment, number: int, *, store: Store, meeting: Meeting, launcher: _Launcher, watcher: Watcher
) -> None:
    """Run this rank's part in a child process, and put its record or its failure into the store."""
    rank, node = launcher.rank, int(os.environ.get("GROUP_RANK", 0))
    place = Place(rank=rank, world_size=assignment.run.ranks, local_rank=launcher.local_rank, node=node)

    def on_message(_: int, content: dict[str, Any]) -> None:
        if "line" in content:
            watcher.log(content["line"])
        if rank == 0:
            watcher.step(content)

    try:
        payload = (assignment, _prefix(number))
        (report,) = run_ranks(_rank_main, [place], payload, logs=assignment.folder, on_message=on_message)
        record = zlib.compress(report.encode())
    except RankFailure as failure:
        record, failed = b"", json.dumps(vars(failure) | {"time": time.time()})
        meeting.ask(lambda: store.set(f"failed{rank}", failed))
    meeting.ask(lambda: store.set(f"record{rank}", record))  # type: ignore[arg-type]


def _collect(run: RunSpec, store: Store) -> list[RankRecord] | RankFailure:
    """The records that all ranks have put into the store, or the failure of the first one that failed."""
    reports = [store.get(f"record{rank}") for rank in range(run.ranks)]
    if all(reports):
        return [RankRecord.from_json(zlib.decompress(report)) for report in reports]
    failures = [json.loads(store.get(f"failed{rank}")) for rank, report in enumerate(reports) if not report]
    # A rank that lost its peer is a consequence of another rank's failure.
    first = min(failures, key=lambda failure: (is_peer_loss(failure["summary"]), failure["time"]))
    del first["time"]
    return RankFailure(f"rank {first['rank']} failed: {first['summary']}", **first)


def _rank_main(place: Place, payload: tuple[Assignment, str], report: Report) -> str:
    """The main function of a rank's child process; returns its record as JSON."""
    assignment, prefix = payload
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=assignment.run.train.timeout_s)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return run_rank(assignment, place, store=PrefixStore(f"{prefix}/group", store), progress=report).to_json()


def _agree_on_checkpoint(meeting: Meeting, path: Path, config: Config, workers: int, launcher: _Launcher) -> Resume:
    """Rank 0 chooses the checkpoint for all ranks; if it cannot, all raise its `UsageError`."""
    store = PrefixStore(f"{_prefix(0)}/resume", meeting.store)
    if launcher.rank == 0:
        try:
            text = json.dumps(asdict(choose(path, config, workers=workers)), default=str)
        except UsageError as error:
            text = json.dumps({"error": str(error)})
        meeting.ask(lambda: store.set("decided", text))
    decided = json.loads(meeting.wait_for("decided", store=store))
    if "error" in decided:
        meeting.leave()
        raise UsageError(decided["error"])
    return Resume(Path(decided["checkpoint"]), decided["step"], tuple(decided["warnings"]))


def _prefix(number: int) -> str:
    """A run's keys in the store; torchrun's agent keeps the store when it restarts all ranks."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/run{number}"


def _join_store(launcher: _Launcher, *, timeout_s: float) -> Store:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", launcher.rank, launcher.world_size, timeout=timeout))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(f"{address} is in use: choose another MASTER_PORT (torchrun --master-port)") from None
        raise UsageError(f"cannot meet the other ranks at {address}: {str(error).splitlines()[0]}") from None
    made: Store = store
    return made
