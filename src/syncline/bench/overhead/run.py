"""`bench overhead`: what attaching costs the host and the memory, against DDP, where the network costs nothing.

Two ranks on this machine over the loopback interface (on one GPU: as two hosts, which is what NCCL accepts) train the
same model alone, under DDP and attached, in blocks of steps that take turns. Every ratio is of two blocks of one round.
Also runnable where typer is not: `python -m syncline.bench.overhead.run --device cuda --out FILE`.
"""

import argparse
import json
import math
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from syncline import codecs
from syncline.bench.codecs.run import table
from syncline.bench.overhead.rank import PHASES, Setting, compression, run_rank
from syncline.bench.timing import environment, summarize
from syncline.cluster.gpu import Mps, rank_environment
from syncline.cluster.nodes import Node
from syncline.cluster.ranks import Place, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError
from syncline.files import write_text
from syncline.train.session.run_folder import busy_share, cores

CODECS = ("bf16", "powersgd(rank=4)")
# The smallest batch at which the model's BatchNorms have something to average; a GPU hardly notices more.
BATCH = {"cpu": 2, "cuda": 8}
_TIMES = ("step", "cpu", "thread", "issue")
_BUSY = 0.1
_LOOPBACK = Node(index=0, name="localhost", address="127.0.0.1", interface="lo", netns="")


def setting(device: str, names: Sequence[str] | None = None, **asked: Any) -> Setting:
    """What to measure: alone, DDP, attached without compression and with each codec. `None` leaves a default."""
    chosen = CODECS if names is None else names
    for name in chosen:
        codecs.build(name)
    ways = ("alone", "ddp", "syncline", *(f"syncline({name})" for name in chosen))
    given = {key: value for key, value in asked.items() if value is not None}
    own = {"batch": BATCH[device], "threads": max(1, cores() // given.get("ranks", Setting.ranks))}
    return Setting(device=device, ways=ways, **{**own, **given})


@contextmanager
def started(
    run: Callable[..., dict[str, Any]], wanted: Setting, progress: Callable[[str], None]
) -> Iterator[tuple[list[dict[str, Any]], Path, float]]:
    """What the ranks of a benchmark found, the folder in which they met, and how busy the machine was before."""
    if min(wanted.batch, wanted.blocks, wanted.steps, wanted.warm_up) < 1 or wanted.ranks < 2:
        raise UsageError("batch, blocks, steps and warm-up are 1 or more, ranks 2 or more")
    if wanted.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' is not here: use --device cpu")
    busy = busy_share(1.0)
    warm_up()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        records = run_ranks(
            run,
            places(wanted, stack),
            (wanted, str(folder / "rendezvous"), str(folder)),
            logs=folder,
            on_message=lambda rank, text: progress(text) if rank == 0 else None,
        )
        yield records, folder, busy


def measure(wanted: Setting, *, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Start the ranks and make a row of each way."""
    with started(run_rank, wanted, progress) as (records, _, busy):
        rows = [row(name, records) for name in wanted.ways]
    result = {
        "environment": environment(torch.device(wanted.device))
        | {"python": platform.python_version(), "platform": platform.platform(), "cores": cores()}
        | {"threads": wanted.threads, "busy_before": round(busy, 3)},
        "command": shlex.join(["python", "-m", "syncline.bench.overhead.run", *_arguments(wanted)]),
        "setting": asdict(wanted),
        "tensors": records[0]["tensors"],
        "gradient_bytes": records[0]["gradient_bytes"],
        "repetitions": f"{wanted.blocks} blocks of {wanted.steps} steps in turn, on each of {wanted.ranks} ranks",
        "warnings": [],
        "rows": rows,
    }
    if busy > _BUSY:
        result["warnings"].append(f"other programs took {busy:.0%} of this machine: preliminary figures")
    for line in result["rows"]:
        if not 1e-3 < line["loss"] < math.inf:
            result["warnings"].append(f"{line['way']}: a loss of {line['loss']:g} makes gradients of another kind")
        if line.get("kept_busy", 1.0) < 0.9:
            result["warnings"].append(f"{line['way']}: the device ran dry while steps were issued")
    return result


def row(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A way's figures over all ranks: medians and quartiles, ratios to DDP and differences from alone by round."""
    mine, ddp, alone = ([record["ways"][way] for record in records] for way in (name, "ddp", "alone"))
    made: dict[str, Any] = {"way": name, "loss": mine[0]["loss"], "plan": mine[0]["plan"]}
    made |= {"ratio_to_ddp": {}, "above_alone_ms": {}}
    for kind in _TIMES:
        if not mine[0][kind]:
            continue
        made[f"{kind}_ms"] = summarize(_pooled(mine, kind)).as_dict()
        pairs = list(zip(_pooled(mine, kind), _pooled(ddp, kind), _pooled(alone, kind), strict=True))
        made["ratio_to_ddp"][kind] = summarize([a / b for a, b, _ in pairs]).as_dict()
        made["above_alone_ms"][kind] = summarize([a - b for a, _, b in pairs]).as_dict()
    for kind in ("phases", "issue_phases"):
        columns = list(zip(*_pooled(mine, kind), strict=True))
        if columns:
            made[f"{kind}_ms"] = {p: summarize(c).as_dict() for p, c in zip(PHASES, columns, strict=True)}
    if mine[0]["kept_busy"]:
        busy = _pooled(mine, "kept_busy")
        made["kept_busy"] = sum(busy) / len(busy)
    gradient = records[0]["gradient_bytes"]
    here, there = mine[0]["memory"], alone[0]["memory"]
    made["memory_bytes"] = here
    made["memory_above_alone_of_gradients"] = {
        moment: (here[moment] - (0 if moment == "state" else there[moment])) / gradient for moment in here
    }
    return made


def _pooled(records: Sequence[dict[str, Any]], kind: str) -> list[Any]:
    return [value for record in records for value in record[kind]]


def places(wanted: Setting, stack: ExitStack) -> list[Place]:
    """Where the ranks run: on this machine, over its loopback interface."""
    gpus = torch.cuda.device_count() if wanted.device == "cuda" else 0
    shared = -(-wanted.ranks // gpus) if gpus else 0
    base = stack.enter_context(Mps()) if shared > 1 else {}
    variables = {**base, "GLOO_SOCKET_IFNAME": _LOOPBACK.interface}
    return [
        Place(
            rank=rank,
            world_size=wanted.ranks,
            local_rank=rank,
            environment=variables | (rank_environment(rank, _LOOPBACK, ranks_on_gpu=shared) if gpus else {}),
        )
        for rank in range(wanted.ranks)
    ]


def headings(result: dict[str, Any]) -> list[str]:
    """Of the table: on CUDA also the issuing and the peak."""
    cuda = result["setting"]["device"] == "cuda"
    columns = ["way", "step ms", "/ddp", "CPU ms", "/ddp", *(["issue ms", "/ddp"] if cuda else ["thread ms", "/ddp"])]
    return [*columns, "+mem step", "+mem wait", *(["+mem peak"] if cuda else []), "state"]


def cells(line: dict[str, Any]) -> list[str]:
    """A row as text: median and half the distance of the quartiles; memory in multiples of the gradients."""
    texts = [line["way"]]
    for kind in ("step", "cpu", "issue" if "issue_ms" in line else "thread"):
        time = line[f"{kind}_ms"]
        texts += [f"{time['median']:.1f} ±{(time['high'] - time['low']) / 2:.1f}"]
        texts += [f"{line['ratio_to_ddp'][kind]['median']:.2f}"]
    return texts + [f"{value:.2f}x" for value in line["memory_above_alone_of_gradients"].values()]


def rich_table(result: dict[str, Any], *, width: int = 120) -> Any:
    """The table for a terminal, without the spread where it is narrow; needs rich."""
    from rich.table import Table

    title = f"overhead: {result['setting']['model']}, {result['tensors']} tensors, {result['setting']['device']}"
    out = Table(title=title, box=None, pad_edge=False)
    for number, heading in enumerate(headings(result)):
        out.add_column(heading, justify="right" if number else "left", no_wrap=width >= 120, overflow="fold")
    for line in result["rows"]:
        out.add_row(*(text if width >= 120 else text.partition(" ±")[0] for text in cells(line)))
    return out


def write(result: dict[str, Any], path: Path) -> None:
    """Put the result in place as JSON, atomically."""
    write_text(json.dumps(result, indent=1) + "\n", path)


def _arguments(wanted: Setting) -> list[str]:
    given = {"device": wanted.device, "model": wanted.model, "data": wanted.data, "batch": wanted.batch}
    given |= {"ranks": wanted.ranks, "blocks": wanted.blocks, "steps": wanted.steps, "warm-up": wanted.warm_up}
    names = ",".join(name for way in wanted.ways if (name := compression(way)))
    given |= {"threads": wanted.threads, "seed": wanted.seed, "codecs": names}
    return [f"--{key}={value}" for key, value in given.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON where asked."""
    from syncline.spec import split

    parser = argparse.ArgumentParser(prog="python -m syncline.bench.overhead.run", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--codecs", help="comma list of specs to attach with; bf16 and powersgd by default")
    for name in ("model", "data"):
        parser.add_argument(f"--{name}", help=f"default: {getattr(Setting, name)}")
    for name in ("batch", "ranks", "blocks", "steps", "warm-up", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int)
    options = vars(parser.parse_args(arguments))
    out, device, names = options.pop("out"), options.pop("device"), options.pop("codecs")
    try:
        chosen = setting(device, None if names is None else split(names), **options)
        result = measure(chosen, progress=lambda text: print(text, file=sys.stderr))
    except UsageError as error:
        parser.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    print(table(headings(result), [cells(line) for line in result["rows"]]))
    print("\n".join(result["warnings"]))
    if out is not None:
        write(result, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
