"""Start the ranks of `overhead` and `recorder` on this machine; their options, command line and result file."""

import argparse
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from syncline.bench.output import environment, write_json
from syncline.bench.training import Options, compression
from syncline.cluster.gpu import mps_daemon, rank_environment
from syncline.cluster.nodes import Cluster, Node
from syncline.cluster.ranks import Place, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError
from syncline.report.figures import text_table
from syncline.trace.record.cpu_time import available_cores
from syncline.train.rank.join import check_device
from syncline.train.session.machine import busy_share

Progress = Callable[[str], None]
BATCH = {"cpu": 2, "cuda": 8}
"""Default batch per rank. Two is the smallest with which BatchNorm works; a GPU needs more to have work."""
_BUSY = 0.1
_LOOPBACK = Node(index=0, address="127.0.0.1", interface="lo", netns="")
_NUMBERS = ("batch", "ranks", "blocks", "steps", "warm_up", "threads", "seed")


def default_options(device: str, ways: Sequence[str], asked: dict[str, Any], **own: Any) -> Options:
    """Options with the defaults of a device; `asked` overrides them, except where a value is None."""
    given = {key: value for key, value in asked.items() if value is not None}
    own |= {"batch": BATCH[device], "threads": max(1, available_cores() // given.get("ranks", Options.ranks))}
    return Options(device=device, ways=tuple(ways), **{**own, **given})


@contextmanager
def ranks_started(
    rank: Callable[..., dict[str, Any]], options: Options, progress: Progress
) -> Iterator[tuple[list[dict[str, Any]], Path, float]]:
    """Run `rank` in all ranks: their records, the folder they shared, and how busy the machine was before."""
    if min(options.batch, options.blocks, options.steps, options.warm_up) < 1 or options.ranks < 2:
        raise UsageError("batch, blocks, steps and warm-up must be 1 or more, ranks 2 or more")
    check_device(options.device, option="--device ")
    busy = busy_share(1.0 if options.blocks > 1 else 0.2)  # a single block is a quick run
    warm_up()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        records = run_ranks(
            rank,
            places(options, stack),
            (options, str(folder / "rendezvous"), str(folder)),
            logs=folder,
            on_message=lambda rank, text: progress(text) if rank == 0 else None,
        )
        yield records, folder, busy


def places(options: Options, stack: ExitStack) -> list[Place]:
    """The ranks on this machine, connected by its loopback interface or each on an emulated node."""
    nodes = [_LOOPBACK] * options.ranks
    if options.bandwidth:
        nodes = list(stack.enter_context(Cluster(options.ranks, bandwidth=options.bandwidth)).nodes)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    shared = -(-options.ranks // gpus) if gpus else 0
    variables = stack.enter_context(mps_daemon()) if shared > 1 else {}
    made = []
    for rank, node in enumerate(nodes):
        own = {"GLOO_SOCKET_IFNAME": node.interface}
        own |= rank_environment(rank, node, ranks_on_gpu=shared) if gpus else {}
        where = Place(rank, options.ranks, rank, node.index, node.netns or None, environment={**variables, **own})
        made.append(where)
    return made


def busy_warnings(busy: float) -> list[str]:
    """A warning if other programs used a relevant share of the machine."""
    return [f"other programs use {busy:.0%} of this machine: preliminary figures"] if busy > _BUSY else []


def result_of(
    name: str, options: Options, rows: Sequence[dict[str, Any]], *, busy: float, **more: Any
) -> dict[str, Any]:
    """The result of a benchmark: environment, command, options, rows, and a warning if the machine was busy."""
    return {
        "environment": environment(torch.device(options.device))
        | {"python": platform.python_version(), "platform": platform.platform(), "cores": available_cores()}
        | {"threads": options.threads, "busy_before": round(busy, 3)},
        "command": _command(name, options),
        "setting": asdict(options),
        **more,
        "warnings": busy_warnings(busy),
        "rows": list(rows),
    }


def _command(name: str, options: Options) -> str:
    """The command that repeats a measurement."""
    values = {key: getattr(options, key) for key in ("device", "model", "data", "bandwidth", *_NUMBERS)}
    if name == "overhead":
        values["codecs"] = ",".join(filter(None, map(compression, options.ways)))
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    return shlex.join(["python", "-m", f"syncline.bench.{name}", *arguments])


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of `python -m syncline.bench.NAME`."""
    made = argparse.ArgumentParser(prog=f"python -m syncline.bench.{name}", description=description)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    made.add_argument("--out", type=Path, help="JSON file")
    for key in ("model", "data", "bandwidth"):
        made.add_argument(f"--{key}", help=f"default: {getattr(Options, key)}")
    for key in _NUMBERS:
        made.add_argument(f"--{key.replace('_', '-')}", type=int)
    return made


def run_command(
    commands: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    options: Callable[..., Options],
    measure: Callable[..., dict[str, Any]],
    table: Callable[[dict[str, Any]], tuple[Sequence[str], Sequence[Sequence[str]]]],
) -> int:
    """Measure with the progress on standard error, print table and warnings, write JSON where asked; the exit code."""
    given = vars(commands.parse_args(arguments))
    out = given.pop("out")
    try:
        result = measure(options(**given), progress=partial(print, file=sys.stderr))
    except UsageError as error:
        commands.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    print(text_table(*table(result)))
    print("\n".join(result["warnings"]))
    if out is not None:
        write_json(result, out)
    return 0
