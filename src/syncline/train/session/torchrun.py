"""The same session when ranks are already running (torchrun, `syncline cluster`, Slurm): this process is one of them.

Every strategy is run by a child of each rank, in a process group of its own over the launcher's store. A child that
fails or aborts takes its connections with it, so that its peers notice; the ranks tell each other the reason through
the store and go on to the next strategy together.
"""

import json
import os
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from syncline._compat import PrefixStore, Store, TCPStore, rendezvous
from syncline.cluster.ranks import Place, Report, is_peer_loss, run_ranks
from syncline.errors import RankFailure, UsageError
from syncline.results.schema import Results
from syncline.train.checkpoint.resume import Resume, check_resumable, choose
from syncline.train.config import Config
from syncline.train.rank.worker import Assignment, run_rank
from syncline.train.session.run_folder import RunFolder, cores
from syncline.train.session.session import (
    Planned,
    Watcher,
    add_result,
    checkpoints_of,
    crashed,
    finish,
    plan_runs,
    start_results,
)

_POLL_S = 0.05
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def run_launched(
    config: Config, *, out: Path | None, watcher: Watcher, resume: Path | None = None
) -> tuple[Path, Results] | None:
    """Take part in every run; rank 0 returns the run folder and the results, the others None."""
    rank, world_size, local_rank, local_size = _coordinates()
    if config.compare.scale:
        raise UsageError("--scale starts ranks itself: leave it out under torchrun, or run without torchrun")
    runs = plan_runs(config, world_size=world_size, fixed=True)
    check_resumable(config, resumed=resume is not None)
    store = _store(rank, world_size, timeout_s=config.train.timeout_s)
    chosen = None if resume is None else _agree(store, resume, config, runs[0].workers, rank, world_size)
    folder, results = None, None
    if rank == 0:
        folder = RunFolder(out, label=config.train.model) if chosen is None else RunFolder.reopen(chosen.run)
        note = "under a launcher: nodes and their links are the launcher's business" if config.cluster.nodes else None
        results = start_results(config, folder, cluster=None, note=note, resume=chosen)
        if "SYNCLINE_NODE" in os.environ:
            results["network"]["emulated"] = True
            results["network"]["nodes"] = _nodes(world_size)
        for text in results["warnings"]:
            watcher.note(text)
    for number, run in enumerate(runs):
        prefix = PrefixStore(_prefix(number), store)
        if folder is not None:
            watcher.begin(run)
            path = folder.strategy(run.strategy, world_size=run.workers, several=False)
            prefix.set("folder", str(path.absolute()))
        try:
            records, failure = _take_part(run, number, prefix, rank, local_rank, local_size, watcher, chosen)
        except UsageError:
            if folder is not None and results is not None and not results["runs"]:
                folder.discard()
            raise
        if folder is None or results is None:
            continue
        target = Path(prefix.get("folder").decode())
        result = crashed(run, failure, target) if failure else finish(run, records, target, nodes=_nodes(world_size))
        add_result(results, result, folder)
        watcher.end(run, result)
    _leave(store, rank, world_size)
    return None if folder is None or results is None else (folder.path, results)


def _take_part(
    run: Planned,
    number: int,
    store: Store,
    rank: int,
    local_rank: int,
    local_size: int,
    watcher: Watcher,
    resume: Resume | None,
) -> tuple[list[dict[str, Any]], RankFailure | None]:
    """Train in this run if this rank has a part in it, then meet everybody; rank 0 gets all records."""
    total = run.workers + run.servers
    folder = Path(store.get("folder").decode())
    folder.mkdir(parents=True, exist_ok=True)
    assignment = Assignment(
        strategy=run.strategy,
        train=run.train,
        workers=run.workers,
        servers=run.servers,
        folder=str(folder),
        count_wire="SYNCLINE_NODE" in os.environ and run.workers > 1 and local_size == 1,
        cores=max(1, cores() * total // min(total, local_size)),
        launched_ns=time.perf_counter_ns(),
        checkpoints=str(checkpoints_of(folder)),
        resume="" if resume is None else str(resume.checkpoint),
        first_step=0 if resume is None else resume.step,
    )
    if rank < total:
        node = int(os.environ.get("GROUP_RANK", 0))
        place = Place(rank=rank, world_size=total, local_rank=local_rank, node=node)
        payload = (assignment, _prefix(number))

        def message(_: int, content: dict[str, Any]) -> None:
            if rank == 0:
                watcher.step(content)

        try:
            (record,) = run_ranks(_rank_main, [place], payload, logs=folder, on_message=message)
            store.set(f"record{rank}", zlib.compress(json.dumps(record).encode()))  # type: ignore[arg-type]
        except RankFailure as failure:
            entry = {"rank": rank, "summary": failure.summary, "traceback": failure.traceback, "time": time.time()}
            store.set(f"failed{rank}", json.dumps(entry))
            store.set(f"record{rank}", "")
    _meet(store, "done", int(os.environ["WORLD_SIZE"]))
    if rank != 0:
        return [], None
    contents = [store.get(f"record{r}") for r in range(total)]
    if all(contents):
        return [json.loads(zlib.decompress(content)) for content in contents], None
    entries = [json.loads(store.get(f"failed{r}")) for r, content in enumerate(contents) if not content]
    first = min(entries, key=lambda entry: (is_peer_loss(entry["summary"]), float(entry["time"])))
    return [], RankFailure(
        f"rank {first['rank']} failed: {first['summary']}",
        rank=first["rank"],
        summary=first["summary"],
        traceback=first["traceback"],
    )


def _agree(store: Store, path: Path, config: Config, workers: int, rank: int, world_size: int) -> Resume:
    """Rank 0 chooses the checkpoint, so that all take the same one; all raise its `UsageError`."""
    store = PrefixStore(f"{_prefix(0)}/resume", store)
    if rank == 0:
        try:
            chosen = choose(path, config, workers=workers)
        except UsageError as error:
            store.set("error", str(error))
        else:
            plain = {"run": str(chosen.run), "checkpoint": str(chosen.checkpoint), "step": chosen.step}
            store.set("chosen", json.dumps(plain | {"warnings": chosen.warnings}))
        store.set("decided", "1")
    while not store.check(["decided"]):
        time.sleep(_POLL_S)
    if store.check(["error"]):
        text = store.get("error").decode()
        _leave(store, rank, world_size)
        raise UsageError(text)
    told = json.loads(store.get("chosen"))
    return Resume(Path(told["run"]), Path(told["checkpoint"]), told["step"], tuple(told["warnings"]))


def _prefix(number: int) -> str:
    """A run's part of the store; torchrun's agent keeps the store when it starts all ranks again."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/run{number}"


def _rank_main(place: Place, payload: tuple[Assignment, str], report: Report) -> dict[str, Any]:
    """The rank itself, in a process of its own: when it fails its connections close, and its peers notice at once."""
    assignment, prefix = payload
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=assignment.train.timeout_s)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return run_rank(
        assignment,
        rank=place.rank,
        local_rank=place.local_rank,
        node=place.node,
        store=PrefixStore(f"{prefix}/group", store),
        progress=report,
    )


def _meet(store: Store, name: str, world_size: int) -> None:
    """Every rank waits here for the others, without a process group.

    Without a limit: another strategy's run may take hours on ranks that this one has no part in, and a launcher ends
    all ranks when one of them dies.
    """
    if store.add(f"{name}-count", 1) == world_size:
        store.set(f"{name}-all", "1")
    while not store.check([f"{name}-all"]):
        time.sleep(_POLL_S)


def _leave(store: Store, rank: int, world_size: int) -> None:
    """Rank 0 may host the store: it stays until nobody will ask it again."""
    _meet(store, "end", world_size)
    left = store.add("left", 0 if rank == 0 else 1)
    while rank == 0 and left < world_size - 1:
        time.sleep(_POLL_S)
        left = store.add("left", 0)


def _coordinates() -> tuple[int, int, int, int]:
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UsageError(f"RANK is set but not {', '.join(missing)}: start ranks with torchrun, or unset RANK")
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        raise UsageError("RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers") from None
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK={rank} is outside WORLD_SIZE={world_size}")
    return rank, world_size, *local


def _store(rank: int, world_size: int, *, timeout_s: float) -> Store:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UsageError(f"{address} is in use: choose another MASTER_PORT (torchrun --master-port)") from None
        raise UsageError(f"cannot meet the other ranks at {address}: {str(error).splitlines()[0]}") from None
    made: Store = store
    return made


def _nodes(world_size: int) -> int:
    return max(1, world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
