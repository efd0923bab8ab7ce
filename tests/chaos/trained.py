"""A training command in a sandbox: its processes, its rows, how it ended, and its state at the end."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sandbox import Running, Sandbox, until

STEPS, EPOCHS, EVERY = 12, 2, 5
TOTAL = STEPS * EPOCHS
TIMEOUT_S = 6.0
GRACE_S = 20.0
"""Beyond the timeout: to look at the other ranks, to save, and for a machine with much else to do."""
SLOW = {"SYNCLINE_TEST_SLEEP": "0.1"}
"""For a run that is to be disturbed: a step takes at least so long."""


@dataclass(frozen=True)
class Job:
    """What is trained; a new strategy must be bit-equal after a resume."""

    strategy: str
    ranks: int
    model: str = "resumable:net"

    def arguments(self, out: str, *where: object) -> list[object]:
        """Of the command; `where` replaces plain local ranks."""
        settings = [f"train.timeout_s={TIMEOUT_S}", "train.test_samples=12", "train.threads=1"]
        return [
            "train", "--strategy", self.strategy, "--model", self.model, "--batch", 12 * self.ranks, "--steps", STEPS,
            "--epochs", EPOCHS, "--checkpoint-every", EVERY, "--out", out, *(where or ("--nproc", self.ranks)),
            *(word for setting in settings for word in ("--set", setting)),
        ]  # fmt: skip


def rows(box: Sandbox, out: str, rank: int = 0) -> int:
    """Steps that a rank has logged."""
    logs = list(box.path(box.folder / out).glob(f"runs/*/rank{rank}.steps.jsonl"))
    return sum(line.endswith("}") for line in logs[0].read_text().splitlines()) if logs else 0


def wait_for_rows(box: Sandbox, running: Running, out: str, count: int) -> None:
    """Return when rank 0 has logged so many steps."""
    assert until(lambda: rows(box, out) >= count or not running.running(), seconds=90), "it trains too slowly"
    assert running.running(), f"it ended before the fault: {running.finish().err}"


def rank_processes(box: Sandbox, command: int) -> dict[int, int]:
    """The process of each rank, by the log that its output goes to; numbers are the machine's."""
    found = {}
    for pid in box.processes():
        try:
            log = Path(f"/proc/{pid}/fd/1").readlink().name
        except OSError:
            continue  # it ended while we looked
        if (match := re.fullmatch(r"rank(\d+)\.log", log)) and pid != command:
            found[int(match[1])] = pid
    return found


def inner_pid(pid: int) -> int:
    """A process's number inside its sandbox."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid")]
    return int(line.split()[-1])


def results(box: Sandbox, out: str) -> dict[str, Any]:
    """`results.json` of a run folder."""
    content: dict[str, Any] = json.loads(box.path(box.folder / out / "results.json").read_text())
    return content


def final_state(box: Sandbox, out: str) -> list[Any]:
    """Everything in the last checkpoint that must not depend on how often the run was interrupted."""
    folder = box.path(box.folder / out / "checkpoints" / f"step-{TOTAL:08d}")
    parts = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
    for part in parts:
        part["history"] = {key: part["history"][key] for key in ("losses", "accuracy")}
        del part["train"]  # its paths
    return parts


def difference(a: Any, b: Any, where: str = "checkpoint") -> str:
    """The first place where two states differ; empty if they are bit-equal."""
    if type(a) is not type(b):
        return where
    if isinstance(a, torch.Tensor):
        return "" if torch.equal(a, b) else where
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return where
        return next((d for key in a if (d := difference(a[key], b[key], f"{where}.{key}"))), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return where
        pairs = enumerate(zip(a, b, strict=True))
        return next((d for i, pair in pairs if (d := difference(*pair, f"{where}[{i}]"))), "")
    return "" if a == b else where


def check_clean(box: Sandbox, running: Running) -> None:
    """No traceback on the terminal, and nothing left behind."""
    assert "Traceback" not in running.err, running.err
    left = box.left_behind()
    assert not left, f"left behind: {left}"


def resume(box: Sandbox, out: str, *options: object) -> None:
    """Resume the run to its end."""
    done = box.syncline("train", "--resume", out, "--trust", *options).finish()
    assert done.code == 0, done.err
    check_clean(box, done)


def cut_link(box: Sandbox, way: str, *, victim: int, owner: int) -> float:
    """Cut the link of the node that `victim` is on; returns when. Both are the machine's numbers."""
    program = Path(__file__).with_name("links.py")
    done = box.start(sys.executable, program, way, inner_pid(victim), inner_pid(owner)).finish()
    assert done.code == 0, done.err
    return float(done.out)
