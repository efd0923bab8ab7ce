"""Run a session for `train` and `compare` and show what came out."""

import json
import sys
from pathlib import Path

from rich.console import Console

from syncline.results.file import strict
from syncline.results.schema import Results
from syncline.train.config import Config
from syncline.train.session.torchrun import is_launched


def execute(config: Config, *, out: Path | None, as_json: bool, resume: Path | None = None) -> int:
    """Run, print the summary (or the JSON) and the report's path; the exit code is 1 when every run crashed."""
    launched = is_launched()
    if config.cluster.nodes and not launched:
        become_able()
    from syncline.cli.watch import watcher
    from syncline.train.session.session import run_session
    from syncline.train.session.torchrun import run_launched

    console = Console(stderr=as_json)
    watch = watcher(console)
    try:
        done = (run_launched if launched else run_session)(config, out=out, watcher=watch, resume=resume)
    finally:
        watch.close()
    if done is None:
        return 0
    path, results = done
    if as_json:
        sys.stdout.write((path / "results.json").read_text())
    else:
        _show(path, results, console)
    return 1 if all(run["status"] == "crashed" for run in results["runs"]) else 0


def _show(path: Path, results: Results, console: Console) -> None:
    from syncline.report.write import print_summary

    print_summary(results, console)
    console.print(f"report: {path / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"results: {path / 'results.json'}", markup=False, highlight=False, soft_wrap=True)


def become_able() -> None:
    """An ordinary user's process must enter its user namespace before torch starts threads."""
    from syncline.cluster.capabilities import capabilities
    from syncline.cluster.privileges import ensure_privileges

    if capabilities().how == "userns":
        ensure_privileges(reexec=True)


def print_json(content: object) -> None:
    """One JSON document on standard output, with null for numbers that JSON does not have."""
    json.dump(strict(content), sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")
