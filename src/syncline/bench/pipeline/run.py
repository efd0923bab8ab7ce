"""`bench pipeline`: pretrain, fine-tune in every way with several seeds, and compare DDP with Pipe+DDP by chunks."""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from syncline.bench.output import environment, read_result, write_between, write_json
from syncline.bench.pipeline.options import Options, ablation
from syncline.bench.pipeline.pretrain import pretrain
from syncline.bench.pipeline.rank import run_rank
from syncline.bench.pipeline.rows import rows_of
from syncline.bench.pipeline.table import markdown, text
from syncline.bench.pipeline.throughput import cells, run_cells
from syncline.bench.ranks import Progress, busy_warnings, places
from syncline.bench.training import Options as RankOptions
from syncline.cluster.ranks import Place, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError
from syncline.trace.record.cpu_time import available_cores
from syncline.train.data.fashion_mnist import DEBIAN
from syncline.train.rank.join import check_device
from syncline.train.session.machine import busy_share

QUICK = {
    "model": "vit(size=tiny, layers=4, patch=8)", "data": "shapes(classes='5-9', train=128, test=64)",
    "pretrain": "shapes(classes='0-4', train=256, test=64)", "pretrain_epochs": 1, "epochs": 3, "ranks": 2, "stages": 2,
    "batch": 32, "seeds": (0,), "freeze": "schedule(alpha=0.5)",
    "freeze_every": 1,
}  # fmt: skip
"""A run of seconds, to see that all works."""
GENERATED = {
    "data": "shapes(classes='0-3', train=10240, test=4000)",
    "pretrain": "shapes(classes='4-9', train=36000, test=2000)",
}
"""The data where Fashion-MNIST is not installed."""


def options_for(asked: dict[str, Any], *, quick: bool = False) -> Options:
    """The options of a command; values that are None have their defaults."""
    given = {key: value for key, value in asked.items() if value is not None}
    options = Options(**{**({} if DEBIAN.exists() else GENERATED), **(QUICK if quick else {}), **given})
    if options.stages < 2 or options.ranks % options.stages:
        raise UsageError(f"--stages {options.stages} of {options.ranks} ranks: use a divisor of --ranks, 2 or more")
    check_device(options.device, option="--device ")
    known = [way.name for way in ablation(options.stages)]
    for name in (*options.ways, options.reference):
        if name not in known:
            raise UsageError(f"there is no way to train '{name}': choose from {', '.join(known)}")
    return options


def measure(
    options: Options, *, progress: Progress = print, weights: Path | None = None, batches: tuple[int, ...] = (),
    steps: int = 5, save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:  # fmt: skip
    """The whole benchmark. `weights`: a file of pretrained weights, made if it does not exist.

    `save` gets the result so far, after each way of the first seed and after each seed: a run of many minutes may be
    interrupted.
    """
    began, busy = time.perf_counter(), busy_share(1.0)
    ranks = RankOptions(
        device=options.device, ways=(), ranks=options.ranks, threads=options.threads, timeout_s=options.timeout_s
    )
    warm_up()
    result: dict[str, Any] = {
        "environment": environment(torch.device(options.device))
        | {"python": platform.python_version(), "platform": platform.platform(), "cores": available_cores()}
        | {"threads": options.threads, "busy_before": round(busy, 3)},
        "command": "python -m syncline.bench.pipeline",
        "setting": asdict(options),
        "pretrained_accuracy": None,
        "chunks": [],
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))
        launch = _Launch(ranks, places(ranks, stack), folder, progress)
        if options.pretrain:
            file = weights or folder / "pretrained.pt"
            if not file.exists():
                result["pretrained_accuracy"] = pretrain(options, file, progress=progress)
                progress(f"pretrained: accuracy {result['pretrained_accuracy']:.2%} on its own classes")
            if file != folder / "pretrained.pt":
                (folder / "pretrained.pt").write_bytes(file.read_bytes())
        if batches:
            result["chunks"] = launch.chunks(options, batches, steps)
        records: list[list[dict[str, Any]]] = []
        crashed: dict[str, str] = {}

        def compared(*more: list[dict[str, Any]]) -> dict[str, Any]:
            rows = _compared(options, [*records, *more], crashed, busy)
            return result | rows | {"seconds": time.perf_counter() - began}

        def save_first(so_far: list[dict[str, Any]], failed: dict[str, str]) -> None:
            crashed.update(failed)
            if not records:
                save(compared(so_far))

        for seed in options.seeds:
            progress(f"seed {seed}")
            found, failed = launch.ways(options, seed, after_way=save_first)
            crashed.update(failed)
            records.append(found)
            save(compared())
        return compared()


def _compared(
    options: Options, records: Sequence[Sequence[dict[str, Any]]], crashed: dict[str, str], busy: float
) -> dict[str, Any]:
    """The rows of all ways that every rank has finished with every seed, with warnings."""
    done = set.intersection(*(set(rank) for ranks in records for rank in ranks))
    names = [way.name for way in options.chosen() if way.name in done]
    reference = options.reference if options.reference in names else names[0] if names else ""
    return {
        "seeds": list(options.seeds[: len(records)]),
        "reference": reference,
        "crashed": crashed,
        "warnings": [*busy_warnings(busy), *(f"{name} crashed: {why}" for name, why in crashed.items())],
        "rows": rows_of(names, records, reference=reference) if names else [],
    }


@dataclass(frozen=True)
class _Launch:
    """Starts ranks for some ways; one that crashes loses only itself."""

    ranks: RankOptions
    places: Sequence[Place]
    folder: Path
    progress: Progress

    def ways(
        self, options: Options, seed: int, *, after_way: Callable[[list[dict[str, Any]], dict[str, str]], None]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The records of each rank by way, and why ways crashed. `after_way` gets both so far."""
        order = options.chosen()
        # Another seed starts with another way, so that no way is always the one on the warmer machine.
        left = [*order[seed % len(order) :], *order[: seed % len(order)]]
        records: list[dict[str, Any]] = [{} for _ in self.places]
        crashed: dict[str, str] = {}

        def hear(rank: int, message: Any) -> None:
            if isinstance(message, str):
                self._say(rank, message)
            else:
                records[rank][message[0]] = message[1]
                if all(message[0] in of_rank for of_rank in records):
                    after_way(records, crashed)

        while left:
            store = str(self.folder / f"rendezvous-{seed}-{len(left)}")
            payload = (self.ranks, store, str(self.folder), options, tuple(left), seed)
            try:
                run_ranks(run_rank, self.places, payload, logs=self.folder, on_message=hear)
            except RankFailure as failure:
                number = next(n for n, way in enumerate(left) if any(way.name not in rank for rank in records))
                crashed[left[number].name] = failure.summary
                self.progress(f"{left[number].name} crashed: {failure.traceback or failure}")
                left = left[number + 1 :]
            else:
                break
        return records, crashed

    def chunks(self, options: Options, batches: tuple[int, ...], steps: int) -> list[dict[str, Any]]:
        """DDP against Pipe+DDP: the speed of rank 0, and the memory of the rank with the most."""
        wanted = tuple(cells(options.ranks, batches))
        job = (self.ranks, str(self.folder / "rendezvous-chunks"), str(self.folder), options, wanted, steps)
        found = run_ranks(run_cells, self.places, job, logs=self.folder, on_message=self._say)
        return [
            line | {"peak_memory_bytes": max(rank[number]["peak_memory_bytes"] for rank in found)}
            for number, line in enumerate(found[0])
        ]

    def _say(self, rank: int, message: str) -> None:
        if rank == 0:
            self.progress(message)


def main(arguments: list[str] | None = None) -> int:
    """The command line of `python -m syncline.bench.pipeline`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.pipeline", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--page", type=Path, help="a page whose part between '<!-- MARK -->' marks gets the tables")
    parser.add_argument("--mark", default="pipeline", help="the name of those marks (default: pipeline)")
    parser.add_argument("--show", type=Path, help="measure nothing: show an earlier JSON file")
    parser.add_argument("--weights", type=Path, help="pretrained weights; made if the file does not exist")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that all works")
    parser.add_argument("--batches", default="", help="also DDP against Pipe+DDP for these batch sizes: 64,128")
    for field in fields(Options):
        name = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(name, action="store_true", default=None)
        elif field.name in ("seeds", "ways"):
            parser.add_argument(name, help="comma-separated")
        else:
            parser.add_argument(name, type=type(field.default))
    given = vars(parser.parse_args(arguments))
    out, weights, quick, batches = (given.pop(key) for key in ("out", "weights", "quick", "batches"))
    target, mark, shown = (given.pop(key) for key in ("page", "mark", "show"))
    for key, kind in (("seeds", int), ("ways", str)):
        given[key] = None if given[key] is None else tuple(kind(word) for word in given[key].split(","))
    sizes = tuple(int(word) for word in batches.split(",") if word)
    try:
        result = read_result(shown) if shown else None
        if result is None:
            options = options_for(given, quick=quick)
            progress = partial(print, file=sys.stderr, flush=True)
            save = partial(write_json, path=out) if out is not None else lambda result: None
            result = measure(options, progress=progress, weights=weights, batches=sizes, save=save)
        if target is not None:
            write_between(target, mark, markdown(result))
    except UsageError as error:
        parser.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    print(text(result))
    return 0 if result["rows"] else 1
