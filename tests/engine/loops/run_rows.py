"""Run rows of the table on real ranks, as the reference and with `attach`, and report differences."""

import contextlib
import gc
import importlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loops import mutations
from loops.references import Ddp, Plain
from loops.table import ROWS, Row
from loops.ways import CODECS, DEVICE, Ours, Run

SUBJECTS = (
    "basics", "normalization", "schedules", "optimizers", "accumulation", "gradients", "touches",
    "state_and_checkpoints", "freezing", "gans_and_several_models", "amp", "compile_and_jit",
    "transformers_and_rnn", "higher_order", "threads_and_wrappers", "rare_calls",
)  # fmt: skip
for _subject in SUBJECTS:
    importlib.import_module(f"loops.{_subject}")

CASE_SECONDS = {"cpu": 10, "cuda": 60}
"""The time limit of a cell; the first ones on a GPU also connect NCCL."""
HANGS = 3
SECONDS: dict[str, float] = {}
"""How long each cell has taken in this process, with its reference where that was not known yet."""
BITS: dict[str, bool] = {}
"""Whether each cell was equal to its reference bit for bit."""


def run_rows(
    rank: int, world: int, wanted: list[str], *, mutation: str | None = None, seconds: float | None = None
) -> dict[str, str | None]:
    """Run cells `row-way` on this rank: problem text or None for each; after `seconds` the rest is left out.

    `mutation` names a fault of `mutations.py`, which is in the engine while the reference is not running.
    """
    references: dict[tuple[str, str], Any] = {}

    def one(cell: str, group: dist.ProcessGroup) -> None:
        name, way = cell.rsplit("-", 1)
        row = ROWS[name]
        # To rounding, but Adam and LBFGS divide by what may be no more than that: they are given doubles.
        double = world > 2 and row.optimizer != "sgd"
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        try:
            key = name, CODECS[way]
            if key not in references:
                reference = Ddp(group) if row.ddp and CODECS[way] == "none" else Plain(group, CODECS[way])
                references[key] = once(row, reference, rank, world)
            with mutations.applied(mutation):
                got = once(row, Ours(group, way, tune=row.tuned and way == "dense"), rank, world)
        finally:
            torch.set_default_dtype(torch.float32)
        exact = _exact(row, way, world)
        BITS[cell] = exact or _same(references[key], got)
        compare(references[key], got, *((0.0, 0.0) if exact else (1e-8, 1e-10) if double else row.tolerance))

    return guarded(wanted, one, seconds=seconds)


def _exact(row: Row, way: str, world: int) -> bool:
    """On CUDA, sums of one tensor depend on where it lies in memory, which `attach` changes: to rounding there."""
    return world <= 2 and way not in row.rounds and DEVICE[0] == "cpu"


def _same(want: dict[str, list[Tensor]], got: dict[str, list[Tensor]]) -> bool:
    try:
        compare(want, got, 0.0, 0.0)
    except AssertionError:
        return False
    return True


def once(row: Row, way: Any, rank: int, world: int) -> dict[str, list[Tensor]]:
    """One row in one way. Every rank starts with other numbers: rank 0's must arrive."""
    torch.manual_seed(100 + rank)
    run = Run(way, rank, world, row.optimizer, row.steps)
    try:
        row.function(run)
        return run.finish()
    finally:
        way.close()
        gc.collect()


def compare(want: dict[str, list[Tensor]], got: dict[str, list[Tensor]], rtol: float, atol: float) -> None:
    """Everything seen in both ways is alike; tolerances of 0 mean the same bits."""
    for what, expected in want.items():
        found = got[what]
        assert len(found) == len(expected), (
            f"{what}: {len(expected)} tensors in the reference, {len(found)} with attach"
        )
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert b.dtype == a.dtype, f"{what} {i}: {a.dtype}, and {b.dtype} in the reference"
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=i, what=what: f"{what} {i}: {text}"
            )


def guarded(
    names: list[str], one: Callable[[str, dist.ProcessGroup], Any], *, seconds: float | None = None
) -> dict[str, str | None]:
    """Call `one(name, group)` for each name, and say what went wrong with it on any rank.

    Each has a time limit, and a new group after one that failed, so that it does not take others with it. After
    `seconds` no more are called.
    """
    problems: dict[str, str | None] = {}
    hangs, start = 0, time.monotonic()
    group: Any = None
    gc.freeze()  # all of torch is in the heap: each collection would look through it
    for name in names:
        if hangs >= HANGS:
            problems[name] = f"not run: {hangs} others hung before"
            continue
        if group is None:
            group = dist.new_group(timeout=timedelta(seconds=CASE_SECONDS[DEVICE[0]]))
        mine: tuple[str, bool] | None = None
        began = time.monotonic()
        try:
            with _time_limit():
                one(name, group)
        except (Exception, pytest.fail.Exception) as error:
            mine = traceback.format_exc(limit=-12), isinstance(error, TimeoutError)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (mine, seconds is not None and time.monotonic() - start > seconds))
        everyones = [problem for problem, _ in answers]
        hangs += any(p is not None and p[1] for p in everyones)
        SECONDS[name] = time.monotonic() - began
        problems[name] = "\n".join(f"rank {r}: {p[0]}" for r, p in enumerate(everyones) if p) or None
        group = group if problems[name] is None else None
        if answers[0][1]:
            break
    return problems


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expired(_signal: int, _frame: Any) -> None:
        stacks = ["".join(traceback.format_stack(f, limit=6)) for f in sys._current_frames().values()]
        raise TimeoutError(f"{CASE_SECONDS[DEVICE[0]]} s are over. All threads:\n" + "\n".join(stacks))

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS[DEVICE[0]])
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
