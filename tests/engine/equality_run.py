"""Run rows of the equality table on real ranks, with torch DDP and with `attach`, and report differences."""

import contextlib
import gc
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import equality_cases  # noqa: F401 - for its rows
import equality_touches  # noqa: F401 - for its rows
import torch
import torch.distributed as dist
from equality_models import BOTH
from equality_table import CASES, Case
from equality_ways import DEVICE, Ddp, Ours, Run
from torch import Tensor

STEPS = {2: 20}
FEWER = 10
"""Steps with 2 ranks, where every row is run, and with other numbers; tuning ends with the sixth."""
CASE_SECONDS = 20
HANGS = 3
NORMS = ("clip_grad_norm", "grad_scaler_and_clipping")
"""On CUDA a norm is summed by the alignment of its memory, which is another one here: to rounding."""
SLOW = "slow_exchange:slow(ms=1.5)"


def rows(world: int) -> list[str]:
    """The rows `case-optimizer` for a number of ranks: all with 2, the core with others, where optimizers alternate."""
    if world == 2:
        return [f"{name}-{kind}" for name, case in CASES.items() for kind in case.optimizers]
    # Where bf16 is to rounding, Adam can make a full step of it: SGD then.
    core = [(name, case.optimizers if not case.tolerance else BOTH[:1]) for name, case in CASES.items() if case.core]
    return [f"{name}-{kinds[(i + world) % min(2, len(kinds))]}" for i, (name, kinds) in enumerate(core)]


def run_rows(rank: int, world: int, wanted: list[str], exchange: str | None, ways: Any = (Ddp, Ours)) -> Any:
    """Run rows in both ways on this rank: problem text or None for each."""

    def one(row: str, group: dist.ProcessGroup) -> None:
        name, kind = row.rsplit("-", 1)
        chosen = CASES[name]
        # To rounding, but Adam and LBFGS divide by what may be no more than that: they are given doubles.
        double = world > 2 and kind != "sgd"
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        try:
            want, got = (once(chosen, make(group, exchange), rank, world, kind) for make in ways)
        finally:
            torch.set_default_dtype(torch.float32)
        exact = chosen.exact and world <= 2 and not (DEVICE[0] == "cuda" and name in NORMS)
        compare(want, got, *((0.0, 0.0) if exact else chosen.tolerance or ((1e-8, 1e-10) if double else (1e-4, 1e-6))))

    return guarded(wanted, one)


def once(chosen: Case, way: Any, rank: int, world: int, kind: str) -> dict[str, list[Tensor]]:
    """One case in one way. Every rank starts with other numbers: rank 0's must arrive."""
    torch.manual_seed(100 + rank)
    run = Run(way, rank, world, kind, STEPS.get(world, FEWER))
    try:
        chosen.function(run)
        return run.finish()
    finally:
        way.close()
        gc.collect()


def compare(want: dict[str, list[Tensor]], got: dict[str, list[Tensor]], rtol: float, atol: float) -> None:
    """Everything seen in both ways is alike; tolerances of 0 mean the same bits."""
    for what, expected in want.items():
        found = got[what]
        assert len(found) == len(expected), f"{what}: {len(expected)} tensors with DDP, {len(found)} with attach"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert b.dtype == a.dtype, f"{what} {i}: {a.dtype}, and {b.dtype} with DDP"
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=i, what=what: f"{what} {i}: {text}"
            )


def guarded(names: list[str], one: Callable[[str, dist.ProcessGroup], Any]) -> dict[str, str | None]:
    """Call `one(name, group)` for each name, and say what went wrong with it on any rank.

    Each gets a group and a time limit of its own, so that one that fails or hangs does not take others with it.
    """
    problems: dict[str, str | None] = {}
    hangs = 0
    gc.freeze()  # all of torch is in the heap: each collection would look through it
    for name in names:
        if hangs >= HANGS:
            problems[name] = f"not run: {hangs} others hung before"
            continue
        group = dist.new_group(timeout=timedelta(seconds=CASE_SECONDS))
        mine: tuple[str, bool] | None = None
        try:
            with _time_limit():
                one(name, group)
        except Exception as error:
            mine = traceback.format_exc(limit=-12), isinstance(error, TimeoutError)
        everyones: list[tuple[str, bool] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        hangs += any(p is not None and p[1] for p in everyones)
        problems[name] = "\n".join(f"rank {r}: {p[0]}" for r, p in enumerate(everyones) if p) or None
        if problems[name] is None:
            dist.destroy_process_group(group)
    return problems


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expired(_signal: int, _frame: Any) -> None:
        stacks = ["".join(traceback.format_stack(f, limit=6)) for f in sys._current_frames().values()]
        raise TimeoutError(f"{CASE_SECONDS} s are over. All threads:\n" + "\n".join(stacks))

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
