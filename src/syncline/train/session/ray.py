"""A session on a Ray cluster (`compare --launcher ray`): each rank is a Ray task that runs the same command.

The tasks get what torchrun would set, so that the command is one of the ranks. Rank 0's progress and the files of all
ranks come back through Ray: the nodes need no shared folder.
"""

import io
import json
import tarfile
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline import trust
from syncline.errors import PeerError, RankFailure, UsageError
from syncline.results import file as results_file
from syncline.results.schema import Results
from syncline.train.config import Config
from syncline.train.session.output import Watcher
from syncline.train.session.ray_tasks import find_port, rank_main, remove_folder
from syncline.train.session.run_folder import RunFolder
from syncline.train.session.runs import list_runs

_ROOM_S = 60.0
"""How long the cluster may take to give every rank its CPU or GPU."""
_GRACE_S = 30.0
"""After a failure: time for rank 0 to save what had finished, once it knows of the failure."""


@dataclass(frozen=True)
class _Rank:
    """One rank: its bundle of the placement group, and the variables that a launcher sets."""

    rank: int
    bundle: int
    variables: Mapping[str, str]


def run_on_ray(
    config: Config, *, out: Path | None, watcher: Watcher, resume: Path | None = None
) -> tuple[Path, Results]:
    """Run the session on the Ray cluster of `RAY_ADDRESS`, or of this machine; returns the run folder and the results.

    `--nproc` ranks are spread over the nodes; by default one for each GPU, or for each node of a cluster without GPUs.
    """
    assert resume is None, "compare does not resume"
    ray = _import_ray()
    with _connected(ray):
        needs, ranks = _needs(ray, config)
        list_runs(config, world_size=ranks, fixed=True)  # a wrong setting is an error here, before anything starts
        folder = RunFolder(out, label=config.train.model).path  # one that cannot be used is an error now
        with _room(ray, needs, ranks) as group:
            files, failure = _run(ray, group, _placed(ray, group, ranks), config, watcher)
    if not any(name == results_file.FILE_NAME for name in names_in(files[0])):
        assert failure is not None
        raise failure
    for number in range(ranks):
        if files[number]:
            with tarfile.open(fileobj=io.BytesIO(files[number])) as archive:
                archive.extractall(folder, filter="data")
    if failure is not None:
        watcher.note(f"what had finished is in {folder}")
        raise failure
    return folder, results_file.load(folder)


def _import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("--launcher ray needs Ray: pip install 'syncline[ray]'") from None
    return ray


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        raise UsageError(
            "no Ray cluster was found: start one with 'ray start --head', or set RAY_ADDRESS=HOST:PORT"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _needs(ray: Any, config: Config) -> tuple[dict[str, float], int]:
    """The resources of a rank, and the number of ranks."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    gpus = int(ray.cluster_resources().get("GPU", 0)) if config.train.device != "cpu" else 0
    if gpus:
        return {"CPU": 1, "GPU": 1}, config.cluster.nproc or gpus
    return {"CPU": 1}, config.cluster.nproc or nodes


@contextmanager
def _room(ray: Any, needs: dict[str, float], ranks: int) -> Iterator[Any]:
    """A placement group with a bundle for each rank, spread over the nodes."""
    group = ray.util.placement_group([needs] * ranks, strategy="SPREAD")
    try:
        if not group.wait(_ROOM_S):
            free = ray.available_resources()
            room = min(int(free.get(name, 0) / amount) for name, amount in needs.items())
            wanted = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
            raise UsageError(
                f"the Ray cluster has no room for {ranks} ranks of {wanted} each: use --nproc {max(1, room)}, or wait"
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _placed(ray: Any, group: Any, ranks: int) -> list[_Rank]:
    """The ranks in order, those of a node next to each other."""
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(ranks), key=lambda bundle: (node_of[bundle], bundle))
    nodes = sorted(set(node_of.values()))
    local: Counter[str] = Counter()
    sizes = Counter(node_of.values())
    address, port = ray.get(_task(ray, find_port, group, order[0]).remote())
    placed = []
    for rank, bundle in enumerate(order):
        node = node_of[bundle]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": local[node],
            "LOCAL_WORLD_SIZE": sizes[node],
            "GROUP_RANK": nodes.index(node),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        placed.append(_Rank(rank, bundle, {name: str(value) for name, value in variables.items()}))
        local[node] += 1
    return placed


def _run(
    ray: Any, group: Any, ranks: list[_Rank], config: Config, watcher: Watcher
) -> tuple[dict[int, bytes], Exception | None]:
    """Run the command on every rank; returns the files of each, and the first failure.

    After a failure rank 0 may need two timeouts to notice it, if it has met the others; then its first line is here.
    """
    folder = Path(tempfile.gettempdir()) / f"syncline-ray-{uuid.uuid4().hex}"
    command = command_of(config, folder / "run")
    running = {
        _task(ray, rank_main, group, rank.bundle, num_returns="streaming").remote(
            command, dict(rank.variables), str(folder)
        ): rank.rank
        for rank in ranks
    }
    files = {rank.rank: b"" for rank in ranks}
    failure: Exception | None = None
    met, deadline = False, float("inf")
    try:
        while running and time.monotonic() < deadline:
            ready, _ = ray.wait(list(running), timeout=1.0)
            for stream in ready:
                rank = running[stream]
                try:
                    message = ray.get(next(stream))
                except StopIteration:
                    del running[stream]
                    continue
                except ray.exceptions.RayError as error:
                    del running[stream]
                    text = f"rank {rank} was lost on the Ray cluster: {_sentence(error)}"
                    failed: Exception | None = PeerError(text, ranks=[rank])
                else:
                    failed = receive(message, rank, files, watcher)
                    met = met or rank == 0
                if failed is not None and failure is None:
                    notices_s = 2 * config.train.timeout_s if met else 0.0
                    failure, deadline = failed, time.monotonic() + notices_s + _GRACE_S
    finally:
        for ended in ranks:
            if ended.rank not in running.values():  # its bundle is free
                with suppress(ray.exceptions.RayError):
                    ray.get(_task(ray, remove_folder, group, ended.bundle).remote(str(folder)))
    return files, failure


def receive(message: dict[str, Any], rank: int, files: dict[int, bytes], watcher: Watcher) -> Exception | None:
    """Take one message of a rank; returns its failure, if it says so."""
    if "line" in message:
        if rank == 0:
            watcher.log(message["line"])
        return None
    files[rank] = message["files"]
    if not message["code"]:
        return None
    last = message["errors"][-1] if message["errors"] else "it said nothing"
    if message["code"] == 2:  # the same for all ranks
        return UsageError(last.removeprefix("syncline: "))
    text = "\n".join(message["errors"])
    summary = f"exit code {message['code']}: {last}"
    return RankFailure(f"rank {rank} ended with {summary}", rank=rank, summary=summary, traceback=text)


def command_of(config: Config, out: Path) -> list[str]:
    """The command of every rank: `compare` with all settings that are not the default."""
    defaults = dict(_flat(Config().as_dict()))
    given = {key: value for key, value in _flat(config.as_dict()) if defaults.get(key) != value}
    settings = [text for key, value in given.items() for text in ("--set", f"{key}={_toml(value)}")]
    trusted = ["--trust"] if trust.current().everything else []
    return ["-m", "syncline", "compare", *settings, *trusted, "--out", str(out), "--json"]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # for text, numbers and lists the same as TOML


def _task(ray: Any, function: Any, group: Any, bundle: int, **options: Any) -> Any:
    """A Ray task in one bundle of the placement group; it is not repeated when it fails."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    needs = group.bundle_specs[bundle]
    resources = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
    return ray.remote(function).options(scheduling_strategy=strategy, max_retries=0, **resources, **options)


def _sentence(error: BaseException) -> str:
    """The last line of an error that says something: Ray's begin with tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def names_in(archive: bytes) -> list[str]:
    """The paths of the files in a tar archive."""
    if not archive:
        return []
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        return [Path(name).as_posix() for name in content.getnames()]
