"""The reference training loop. One step, in pseudocode:

data        this rank's slice of the global batch, moved to the device
for each phase of the workload (one; two for a GAN):
    forward     the phase's loss
    backward    its gradients; DDP exchanges behind this
    exchange    the strategy makes gradients equal on all ranks
    update      the phase's optimizer
every so many steps, and at the end: a checkpoint, with nothing in flight
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.trace import Recorder
from syncline.train.rank.live import Live
from syncline.train.rank.sampler import Sampler
from syncline.train.rank.wire_bytes import Counters, read_counters
from syncline.train.strategies import Synchroniser
from syncline.train.workload import Workload

Progress = Callable[[dict[str, Any]], None]
_EVAL_BATCH = 250
_LOOKED = 20  # of the steps that are written at once, those whose phases are told


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float | None = None
    epoch_s: float = 0.0
    """Seconds of training in the epoch under way, at the last checkpoint."""
    resumed_at: list[int] = field(default_factory=list)
    """Steps at which a later process went on."""
    wire: Counters | None = None
    """Bytes a step, over all steps but the first ones."""


class Gate(Protocol):
    """Lets a loop take turns with other programs on the machine."""

    def due(self, step: int) -> bool:
        """Whether the turn ends before this step."""
        ...

    def wait(self, loop: "Loop", outcome: Outcome) -> bool:
        """Return when it is the loop's turn again; False ends the training. Nothing is in flight meanwhile."""
        ...


@dataclass(frozen=True)
class Loop:
    """All that the loop needs; `run` does the rest."""

    workload: Workload
    synchronisers: list[Synchroniser]
    optimizers: list[torch.optim.Optimizer]
    sampler: Sampler
    recorder: Recorder
    device: torch.device
    epochs: int
    steps: int
    """Steps an epoch."""
    test_samples: int
    count_wire: bool
    log: Path
    progress: Progress
    synchronised_bytes: int
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes none."""
    checkpoint: Callable[[Outcome], None] | None = None
    gate: Gate | None = None
    live: Live = field(default_factory=Live)

    def run(self, begun: Outcome | None = None) -> Outcome:
        """Train, on from where `begun` had come; a row a step goes to the log as it happens."""
        outcome = begun or Outcome()
        first_reading: Counters | None = None
        first, total = len(outcome.losses), self.epochs * self.steps
        warm = max(synchroniser.warm_steps for synchroniser in self.synchronisers)
        first_counted = max(first, min(first + warm, total - 2))
        going = True
        with self.log.open("a" if first else "w") as log:
            for epoch in range(first // self.steps, self.epochs):
                started = time.perf_counter() - outcome.epoch_s
                rows: list[tuple[int, Tensor]] = []
                for step in range(max(first, epoch * self.steps), (epoch + 1) * self.steps):
                    if self.gate is not None and self.gate.due(step):
                        self._rest()
                        self._write(log, epoch, rows, outcome)
                        going = self.gate.wait(self, outcome)
                        if not going:
                            break
                    rows.append((step, self._step(step)))
                    if step == first_counted and self.count_wire:
                        self._finish_work()
                        first_reading = read_counters()
                    if self.device.type == "cpu":
                        self._write(log, epoch, rows, outcome)
                    if self._due(step + 1) and (step + 1) % self.steps:
                        self._finish_work()
                        self._write(log, epoch, rows, outcome)
                        outcome.epoch_s = time.perf_counter() - started
                        self._save(outcome)
                self._finish_work()
                # On a GPU a row needs finished events: rows are written an epoch at a time, without a sync a step.
                self._write(log, epoch, rows, outcome)
                outcome.epochs.append(self._epoch(epoch, time.perf_counter() - started, outcome))
                outcome.epoch_s = 0.0
                # After the evaluation, which is a part of the epoch and may make buffers equal.
                if self._due((epoch + 1) * self.steps):
                    self._finish_work()
                    self._save(outcome)
                if not going:
                    break
        if first_reading is not None and total - 1 > first_counted:
            moved = outcome.epochs[-1].pop("wire").since(first_reading)
            steps = total - 1 - first_counted
            outcome.wire = Counters(round(moved.sent / steps), round(moved.received / steps))
        for record in outcome.epochs:
            record.pop("wire", None)
        return outcome

    def rehearse(self, step: int) -> None:
        """Pass a batch through and forget it, where a first pass settles something: call before a state is restored."""
        batch = self._batch(step)
        self.recorder.enabled, enabled = False, self.recorder.enabled
        for synchroniser, optimizer in zip(self.synchronisers, self.optimizers, strict=True):
            if synchroniser.settles:
                synchroniser.backward(synchroniser.module(*batch))
                optimizer.zero_grad(set_to_none=True)
        self.recorder.enabled = enabled

    def _due(self, done: int) -> bool:
        last = done == self.epochs * self.steps
        return self.checkpoint is not None and self.checkpoint_every > 0 and (last or not done % self.checkpoint_every)

    def _save(self, outcome: Outcome) -> None:
        assert self.checkpoint is not None
        self.checkpoint(outcome)

    def _finish_work(self) -> None:
        """Let what was issued happen before something outside is read: the engine and a GPU's host run ahead."""
        for synchroniser in self.synchronisers:
            synchroniser.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _rest(self) -> None:
        """Nothing is in flight, and memory that only a step needs is there for others."""
        self._finish_work()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _step(self, step: int) -> Tensor:
        recorder = self.recorder
        recorder.step = step
        begin = recorder.mark("step")
        with recorder.span("data"):
            batch = self._batch(step)
        losses = []
        for synchroniser, optimizer in zip(self.synchronisers, self.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            with recorder.span("forward"):
                loss = synchroniser.module(*batch)
            synchroniser.backward(loss)
            synchroniser.synchronise()
            with recorder.span("update"):
                optimizer.step()
            losses.append(loss.detach())
        recorder.add("step", "step", begin, recorder.mark("step"))
        return torch.stack(losses).sum()

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        number, indices = self.sampler(step)
        batch = self.workload.train.batch(indices, epoch=number)
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)

    def _write(self, log: Any, epoch: int, rows: list[tuple[int, Tensor]], outcome: Outcome) -> None:
        totals = self.recorder.lane_ns(rows[0][0]) if rows else {}
        phases = self.live.look(self.recorder, [step for step, _ in rows[-_LOOKED:]])
        for step, loss in rows:
            value = float(loss)
            lanes = {lane: ns / 1e6 for lane, ns in totals[step].items()}
            outcome.losses.append(value)
            outcome.step_ms.append(lanes.get("step", 0.0))
            seconds = lanes.get("step", 0.0) / 1e3 or float("nan")
            row = {
                "step": step,
                "epoch": epoch + 1,
                "loss": value if math.isfinite(value) else None,
                "step_ms": lanes.get("step", 0.0),
                **{f"{lane}_ms": round(lanes.get(lane, 0.0), 4) for lane in ("data", "forward", "backward")},
                **{f"{lane}_ms": round(lanes.get(lane, 0.0), 4) for lane in ("exchange", "update")},
                "samples_per_s": round(self.sampler.batch / seconds, 3),
                "syncs_per_s": round(len(self.synchronisers) / seconds, 4) if self.synchronised_bytes else 0.0,
                "synchronised_bytes": self.synchronised_bytes,
            }
            log.write(json.dumps(row) + "\n")
            log.flush()
            told = {"step": step, "loss": value, **{k: row[k] for k in ("epoch", "step_ms")}}
            self.progress({**told, "phases": phases.get(step)})
        rows.clear()

    def _epoch(self, epoch: int, train_s: float, outcome: Outcome) -> dict[str, Any]:
        losses = outcome.losses[epoch * self.steps :]
        record: dict[str, Any] = {"epoch": epoch + 1, "train_s": train_s, "test_s": None}
        record["loss"] = sum(losses) / len(losses)
        if self.count_wire:
            record["wire"] = read_counters()  # before the evaluation, which may exchange buffers
        started = time.perf_counter()
        for synchroniser in self.synchronisers:
            synchroniser.synchronise_buffers()
        accuracy = self._evaluate()
        if accuracy is not None:
            record["test_s"] = time.perf_counter() - started
            outcome.accuracy = accuracy
        return record

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        test, score = self.workload.test, self.workload.evaluate
        if test is None or score is None or self.test_samples <= 0:
            return None
        modules = [phase.module for phase in self.workload.phases]
        for module in modules:
            module.eval()
        correct, counted = 0.0, 0
        for indices in torch.arange(min(self.test_samples, len(test))).split(_EVAL_BATCH):
            right, number = score(tuple(t.to(self.device) for t in test.batch(indices)))
            correct, counted = correct + right, counted + number
        for module in modules:
            module.train()
        return correct / counted if counted else None
