"""The log of training steps: a row per step in `rank0.steps.jsonl`, and progress messages with live phases."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from syncline.files import open_log, writing
from syncline.trace import Recorder
from syncline.trace.analysis.timeline import partition
from syncline.trace.span import STEP
from syncline.train.checkpoint.history import History

LIVE_PHASES = ("data", "forward", "backward", "encode", "exchange and wait", "update", "other")
"""The phases in progress messages. A single rank cannot separate an exchange from the wait for a late rank."""
LIVE_COST = 0.003
"""The largest share of the run's time that computing live phases may take."""
Progress = Callable[[dict[str, Any]], None]

_LIVE_NAMES = {
    "exposed_encode": "encode", "exposed_exchange": "exchange and wait", "wait": "exchange and wait",
    "between": "other",
}  # fmt: skip
_FIRST_BUDGET_S, _LARGEST_BUDGET_S = 0.002, 0.05
_LIVE_STEPS = 20  # of the rows written at once, the last ones get live phases


class LivePhases:
    """Computes the phases of finished steps, as often as a time budget allows; the budget grows with time."""

    def __init__(self) -> None:
        self._budget_s, self._last, self._cost_s = _FIRST_BUDGET_S, time.perf_counter(), 0.0

    def compute(self, recorder: Recorder, steps: Sequence[int]) -> dict[int, dict[str, float]]:
        """Milliseconds by phase of consecutive finished steps of this rank; empty if the budget is spent.

        They sum to each step's time. On CUDA the steps' events must have happened.
        """
        begin = time.perf_counter()
        self._budget_s = min(_LARGEST_BUDGET_S, self._budget_s + LIVE_COST * (begin - self._last))
        self._last = begin
        if not steps or self._budget_s < self._cost_s:
            return {}
        # Exchanges of the step before may reach into the first.
        spans = [s for s in recorder.spans(steps[0] - 1) if s.lane != STEP or s.step >= steps[0]]
        found = {}
        for step, parts in partition(spans, on_gpu=recorder.device.type == "cuda").items():
            found[step] = dict.fromkeys(LIVE_PHASES, 0.0)
            for phase, ns in parts.items():
                found[step][_LIVE_NAMES.get(phase, phase)] += ns / 1e6
        self._cost_s = time.perf_counter() - begin
        self._budget_s -= self._cost_s
        return found


class StepLog:
    """Writes finished steps to a file, to the history and to the progress callback."""

    def __init__(
        self,
        path: Path,
        recorder: Recorder,
        *,
        batch: int,
        phases: int,
        steps: int,
        log_every: int,
        progress: Progress,
    ) -> None:
        """`steps`: of an epoch; `log_every`: steps between printed lines, 0 prints none."""
        self.path, self._recorder, self._progress = path, recorder, progress
        self._batch, self._phases, self._steps, self._log_every = batch, phases, steps, log_every
        self._live = LivePhases()
        self._pending: list[tuple[int, Tensor, int]] = []
        self._added = self._synchronised = 0

    @contextmanager
    def open(self, *, append: bool) -> Iterator[TextIO]:
        """The file for `write`. Errors name it; on a full disk, closing fails again, and that error is of no use."""
        with writing(self.path):
            file = os.fdopen(open_log(self.path, append=append), "w", encoding="utf-8")
        try:
            yield file
        except BaseException:
            with suppress(OSError):
                file.close()
            raise
        with writing(self.path):
            file.close()

    def add(self, step: int, loss: Tensor, synchronised_bytes: int) -> None:
        """A step was issued; it is written later, because its loss may still be computed on a GPU."""
        self._pending.append((step, loss, synchronised_bytes))
        self._added += 1
        self._synchronised += synchronised_bytes

    @property
    def synchronised_bytes(self) -> float:
        """Bytes of the gradients that were averaged in a step, the mean of all: fewer train after a freeze."""
        return self._synchronised / max(1, self._added)

    def write(self, file: TextIO, *, epoch: int, history: History) -> None:
        """Write all steps that were added into the open log at `path`; their events must have happened."""
        rows, self._pending = self._pending, []
        totals = self._recorder.lane_ns(rows[0][0]) if rows else {}
        live = self._live.compute(self._recorder, [step for step, *_ in rows[-_LIVE_STEPS:]])
        for step, loss, synchronised_bytes in rows:
            value = float(loss)
            lanes = {lane: ns / 1e6 for lane, ns in totals[step].items()}
            step_ms = lanes.get(STEP, 0.0)
            seconds = step_ms / 1e3 or float("nan")
            history.losses.append(value)
            history.step_ms.append(step_ms)
            row = {
                "step": step,
                "epoch": epoch + 1,
                "loss": value if math.isfinite(value) else None,
                "step_ms": step_ms,
                **{
                    f"{lane}_ms": round(lanes.get(lane, 0.0), 4)
                    for lane in ("data", "forward", "backward", "exchange", "update")
                },
                "samples_per_s": round(self._batch / seconds, 3),
                "syncs_per_s": round(self._phases / seconds, 4) if synchronised_bytes else 0.0,
                "synchronised_bytes": synchronised_bytes,
            }
            with writing(self.path):
                file.write(json.dumps(row) + "\n")
                file.flush()
            message: dict[str, Any] = {"step": step, "epoch": epoch + 1, "loss": value, "step_ms": step_ms}
            if self._log_every and (step + 1) % self._log_every == 0:
                message["line"] = log_line(row, rank=self._recorder.rank, steps=self._steps)
            self._progress({**message, "phases": live.get(step)})


def log_line(row: Mapping[str, Any], *, rank: int, steps: int) -> str:
    """The line that a rank prints for a step: times, samples and synchronisations per second, and their size."""
    data, forward, backward = (row[f"{lane}_ms"] for lane in ("data", "forward", "backward"))
    return (
        f"rank {rank}, epoch {row['epoch']}, step {row['step'] % steps + 1}/{steps}:"
        f" data loading {data:.1f} ms, forward {forward:.1f} ms, backward {backward:.1f} ms,"
        f" {row['samples_per_s']:.1f} samples/s, {row['syncs_per_s']:.3f} syncs/s,"
        f" {row['synchronised_bytes'] / 1e6:.3f} MB synchronised"
    )
