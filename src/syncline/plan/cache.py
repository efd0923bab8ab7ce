"""The plan cache: plans of earlier runs, one JSON file each, so that the next run of the same job starts tuned.

A file is found by the job that it was made for (see `Job`), and used only on a network of about the same speed. Nothing
in it is run: its codecs must be among those that the user asked for now.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import parse_json, read_text, reason, write_text
from syncline.plan.costs import Costs, costs_of
from syncline.plan.errors import Errors, errors_of
from syncline.plan.file import parse, text_of
from syncline.plan.predict import built
from syncline.plan.table import Plan
from syncline.trust import check_file

VERSION = 2
VARIABLE = "SYNCLINE_PLAN_CACHE"
"""Environment variable: the folder of the cache, or `off`."""
SAME_NETWORK = 0.3
"""Networks are alike if their times for a dense exchange differ by less than this share..."""
SMALL = 0.1
"""...or by less than this share of a step."""
HIDDEN = 0.75
"""A dense exchange below this share of a step is mostly hidden behind the backward pass. A short probe of such a fast
network is inexact."""
MOST_FILES = 500
_OFF = ("", "0", "off", "no", "false")
_TESTS = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")


@dataclass(frozen=True)
class Job:
    """What a plan is made for, as far as it is known before the first step."""

    parameters: tuple[str, ...]
    """Name, shape, dtype and whether it is frozen, of each parameter."""
    world: int
    nodes: tuple[int, ...]
    """By rank, the number of its machine."""
    device: str
    """The kind of device and its name; on a CPU with the number of cores and threads."""
    request: str
    """What `attach` was asked for: codecs, exchange, update."""
    versions: str
    """Of Syncline and torch."""

    @property
    def key(self) -> str:
        """Sixteen hex digits of all of it."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Remembered:
    """A plan and what is known about it. Times are seconds."""

    plan: Plan
    step: float
    before: float
    """A step with DDP's buckets; 0 if none was timed."""
    network: float
    """A dense exchange of all gradients, right after planning."""
    gain: float
    """What measurements that were not taken yet may gain per step at most."""
    why: str
    costs: Costs | None = None
    errors: Errors | None = None

    def suits(self, network: float) -> bool:
        """Whether the plan is right for a network with this time for a dense exchange: it is about the same.

        A plan that only overlaps dense gradients with the backward pass is right for any faster network, too. A plan of
        torch's reducer is right for all networks on which the backward pass hides the exchange.
        """
        reducer = self.plan.executor == "reducer"
        if reducer and network < self.network and self.plan.units[0].codec == "none":
            return True
        if reducer and max(network, self.network) < HIDDEN * self.step:
            return True
        return abs(network - self.network) <= max(SAME_NETWORK * self.network, SMALL * self.step)


def cache_folder(asked: bool | str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of the cache, or None if it is off.

    `asked` decides if it is given, then the variable SYNCLINE_PLAN_CACHE (a folder, or `off`). Without both it is off
    under pytest, and else `$XDG_CACHE_HOME/syncline/plans` or `~/.cache/syncline/plans`.
    """
    if asked is False:
        return None
    if asked is not None and asked is not True:
        return Path(asked)
    given = os.environ.get(VARIABLE)
    if given is not None and (asked is None or given.lower() not in _OFF):
        return None if given.lower() in _OFF else Path(given)
    if asked is None and any(name in os.environ for name in _TESTS):
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "syncline" / "plans"
    except RuntimeError:  # no home folder
        return None


def write(folder: Path, job: Job, found: Remembered) -> Path:
    """Save a plan, in place of an earlier one for about the same network; `OSError` if that is not possible."""
    facts = {"step": found.step, "before": found.before, "network": found.network, "gain": found.gain}
    content = {
        "version": VERSION,
        "job": asdict(job),
        **facts,
        "why": found.why,
        "plan": text_of(found.plan),
        "costs": None if found.costs is None else json.loads(found.costs.to_json()),
        "errors": None if found.errors is None else json.loads(found.errors.to_json()),
    }
    speed = round(math.log(max(found.network, 1e-9)) / math.log(1 + SAME_NETWORK))
    path = folder / f"{job.key}{speed:+d}.json"
    write_text(json.dumps(content, indent=1) + "\n", path)
    for other in (folder / f"{job.key}{near:+d}.json" for near in (speed - 1, speed + 1)):
        if abs(_network_in(other) - found.network) <= SAME_NETWORK * found.network:
            other.unlink(missing_ok=True)
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for old in files[:-MOST_FILES]:
        old.unlink(missing_ok=True)
    return path


def read(folder: Path, job: Job, codecs: Collection[str]) -> tuple[list[str], list[str]]:
    """Texts of all usable files for a job, and a sentence about each file that is ignored.

    `codecs` are those that a plan may use.
    """
    texts, problems = [], []
    for path in sorted(folder.glob(f"{job.key}[+-]*.json")):
        try:
            text = read_text(path)
            parse_remembered(text, job, codecs)
            texts.append(text)
        except (OSError, ValueError) as error:
            problems.append(f"the plan cache's file {path} is ignored: {reason(error)}; delete it")
    return texts, problems


def parse_remembered(text: str, job: Job, codecs: Iterable[str]) -> Remembered:
    """A file's content; `ValueError` if it is not one, or not of this job."""
    table: Any = parse_json(text)
    try:
        if table["version"] != VERSION:
            raise ValueError(f"it has version {table['version']}, not {VERSION}")
        if table["job"] != json.loads(json.dumps(asdict(job))):
            raise ValueError("it belongs to another job")
        step, before, network, gain = (float(table[key]) for key in ("step", "before", "network", "gain"))
        if not all(math.isfinite(number) and number >= 0 for number in (step, before, network, gain)):
            raise ValueError("a time in it is not a number of seconds")
        plan = parse(str(table["plan"]), of="its plan")
        costs = None if table["costs"] is None else costs_of(table["costs"])
        errors = None if table["errors"] is None else errors_of(table["errors"])
        found = Remembered(plan, step, before, network, gain, str(table["why"]), costs, errors)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it does not hold a remembered plan ({error!r})") from None
    asked = list(codecs)
    known = {*asked, *(built(codec).text for codec in asked)}  # as they were written, and as the planner writes them
    for unit in plan.units:
        if unit.codec not in known:
            raise UsageError(f"its plan has codec '{unit.codec}', which was not asked for")
        check_file(unit.exchange, source="its plan", fix="name it with exchange=")
    return found


def _network_in(path: Path) -> float:
    """The network of a file; `inf` if there is none."""
    try:
        return float(parse_json(read_text(path))["network"])
    except (OSError, ValueError, TypeError, KeyError):
        return math.inf


def nearest(found: Iterable[Remembered], network: float) -> Remembered | None:
    """The plan for the network that is most like this one, if it is about the same."""
    suitable = [one for one in found if one.suits(network)]
    return min(suitable, key=lambda one: abs(math.log(max(one.network, 1e-9) / max(network, 1e-9))), default=None)
