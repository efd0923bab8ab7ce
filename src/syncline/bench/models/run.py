"""`bench models`: one contest of `bench overlap` for each model and bandwidth; finished cells stay in the file."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from syncline.bench.models.cells import SIZES, Cell, Setting, chosen, contests
from syncline.bench.models.rows import cell_of, contest_rows, merged
from syncline.bench.overlap import run as overlap
from syncline.bench.overlap.rounds import Turns
from syncline.bench.ranks import Progress, busy_warnings
from syncline.errors import UsageError
from syncline.files import read_text
from syncline.train.config import Config
from syncline.train.session.machine import environment

SCHEMA = 1
FOLDER = Path("runs") / "bench-models"


@dataclass(frozen=True)
class Options:
    """What is measured; `size` is empty for the one that suits the device."""

    size: str = ""
    nodes: int = 2
    seed: int = 0
    rounds: int = 3
    seconds: float = 4.0
    steps: int = 20
    at_once: int = 11
    """The most strategies of a contest, all of which are in memory together."""

    def __post_init__(self) -> None:
        if self.size and self.size not in SIZES:
            raise UsageError(f"--size {self.size}: use {' or '.join(SIZES)}")
        if self.at_once < 2:
            raise UsageError(f"--at-once {self.at_once}: use 2 or more, ddp is one of them")
        if not 2 <= self.nodes <= 64:
            raise UsageError(f"--nodes {self.nodes}: use 2 to 64")

    @property
    def turns(self) -> Turns:
        """The turns of a contest."""
        return Turns(rounds=self.rounds, seconds=self.seconds, steps=self.steps)

    @property
    def same(self) -> dict[str, Any]:
        """What all rows of a file have in common."""
        size = self.size or ("paper" if torch.cuda.is_available() else "small")
        return {"size": size, "nodes": self.nodes, "seed": self.seed}


def quick_options(seed: int) -> Options:
    """Options of `--quick`: seconds on two cores, to see that all works."""
    return Options(size="small", seed=seed, rounds=1, seconds=0.2, steps=3)


def measure(
    options: Options,
    *,
    only: str = "",
    quick: bool = False,
    again: bool = False,
    out: Path | None = None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    progress: Progress = print,
) -> dict[str, Any]:
    """Measure the cells that are missing in `out`/models.json; `save` gets the result after each contest.

    `only`: the cells whose label has these words. `again`: measure them also where they are done.
    """
    folder = out or FOLDER
    turns = options.turns
    cells = chosen(only, quick=quick)
    result = _before(folder / "models.json", options)
    if again:
        result["rows"] = [row for row in result["rows"] if cell_of(row) not in cells]
    groups = contests(cells, [cell_of(row) for row in result["rows"]], at_once=options.at_once)
    for number, group in enumerate(groups, 1):
        first = group[0]
        progress(f"{first.model}, {first.bandwidth}: {len(group)} strategies, contest {number} of {len(groups)}")
        config = _config(SIZES[options.same["size"]][first.model], group, options)
        name = f"{first.model}-{first.bandwidth}"
        _, found = overlap.measure(config, turns, out=folder / "contests" / name, progress=progress)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        result["rows"] = merged(result["rows"], contest_rows(group, found, measured=at), chosen())
        result["warnings"] = _warnings(result["rows"])
        save(result)
    return result


def _before(file: Path, options: Options) -> dict[str, Any]:
    """The result in the file, or an empty one."""
    empty = {
        "schema": SCHEMA,
        "setting": {**asdict(options), **options.same},
        "environment": environment(),
        "warnings": [],
        "rows": [],
    }
    if not file.exists():
        return empty
    try:
        found = json.loads(read_text(file))
        same = {key: found["setting"][key] for key in options.same}
        if found["schema"] != SCHEMA or not all(cell_of(row) for row in found["rows"]):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{file} is no result of bench models: use another --out, or remove it") from None
    if same != options.same:
        raise UsageError(f"{file} has rows of {_words(same)}, not of {_words(options.same)}: use another --out")
    return {**empty, "rows": found["rows"], "warnings": found.get("warnings", [])}


def _words(same: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in same.items())


def _config(setting: Setting, group: tuple[Cell, ...], options: Options) -> Config:
    return Config().override(
        {
            "train.model": setting.model,
            "train.data": setting.data,
            "train.batch": setting.batch * options.nodes // 2,
            "train.seed": options.seed,
            "train.test_samples": 0,
            "cluster.nodes": options.nodes,
            "cluster.bandwidth": group[0].bandwidth,
            # Compute alone is the bound's other half.
            "compare.strategies": ["local", *(cell.strategy for cell in group)],
        }
    )


def _warnings(rows: list[dict[str, Any]]) -> list[str]:
    found = [
        f"{row['model']}, {row['bandwidth']}: {text}" for row in rows for text in busy_warnings(row["busy_before"])
    ]
    crashed = [f"{cell_of(row).label} crashed: {row['error']['summary']}" for row in rows if row["error"]]
    return list(dict.fromkeys([*found, *crashed]))
