"""The reference training loop of one rank, and its evaluation on the test set.

One step, in pseudocode:

data        this rank's slice of the global batch, moved to the device
for each phase of the workload (one; two for a GAN):
    forward     the phase's loss
    backward    its gradients; DDP exchanges behind this
    exchange    the strategy makes gradients equal on all ranks
    update      the phase's optimizer
every `checkpoint_every` steps, and at the end: a checkpoint, with nothing in flight
after each epoch: blocks freeze, a checkpoint if the shape of a pipeline will change, and the change
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.train.checkpoint.history import History
from syncline.train.config import Train
from syncline.train.data import Dataset
from syncline.train.data.sampler import Sampler
from syncline.train.rank.memory import PeakMemory
from syncline.train.rank.network_counters import NetworkBytes, StepTraffic
from syncline.train.rank.step_log import StepLog
from syncline.train.strategies import Context, Synchroniser
from syncline.train.workload import Workload

_EVAL_BATCH = 250
_TRAIN_SAMPLES = 500
"""The most training samples of which the accuracy is measured, once, at the end."""


class Gate(Protocol):
    """Lets a loop take turns with other programs on the machine."""

    def due(self, step: int) -> bool:
        """Whether the turn ends before this step."""
        ...

    def wait(self, loop: "Loop", history: History) -> bool:
        """Return when it is the loop's turn again; False ends the training. Nothing is in flight meanwhile."""
        ...


@dataclass(frozen=True)
class Loop:
    """The training loop's parts and settings; `run` trains."""

    workload: Workload
    synchronisers: list[Synchroniser]
    optimizers: list[torch.optim.Optimizer]
    sampler: Sampler
    context: Context
    device: torch.device
    log: StepLog
    train: Train
    steps: int
    """Steps per epoch."""
    count_network: bool
    checkpoint: Callable[["Loop", History], Path]
    """Writes one, on all ranks together."""
    gate: Gate | None = None
    memory: PeakMemory | None = None
    """The memory of this rank, for a gate that reports it."""

    def run(self, history: History) -> NetworkBytes | None:
        """Train from the end of `history` on and extend it; returns the network bytes per step if they are counted."""
        first, total = len(history.losses), self.train.epochs * self.steps
        if first and not first % self.steps:
            self._follow_freeze(history, saved=True)
        warm_up = max(synchroniser.warm_up_steps for synchroniser in self.synchronisers)
        first_counted = max(first, min(first + warm_up, total - 2))
        traffic, going = StepTraffic(), True
        with self.log.open(append=first > 0) as file:
            for epoch in range(first // self.steps, self.train.epochs):
                started = time.perf_counter() - history.epoch_s
                traffic.resume()
                for step in range(max(first, epoch * self.steps), (epoch + 1) * self.steps):
                    if self.gate is not None and self.gate.due(step):
                        self._wait_for_work()
                        if self.device.type == "cuda":
                            torch.cuda.empty_cache()  # for the other programs
                        self.log.write(file, epoch=epoch, history=history)
                        going = self.gate.wait(self, history)
                        if not going:
                            break
                    self.log.add(step, self._step(step), self._synchronised_bytes())
                    traffic.step()
                    if step == first_counted and self.count_network:
                        self._wait_for_work()
                        traffic.begin()
                    if self.device.type == "cpu":
                        self.log.write(file, epoch=epoch, history=history)
                    if self._checkpoint_due(step + 1) and (step + 1) % self.steps:
                        self._wait_for_work()
                        traffic.pause()
                        self.log.write(file, epoch=epoch, history=history)
                        history.epoch_s = time.perf_counter() - started
                        self._save(history)
                        traffic.resume()
                self._wait_for_work()
                traffic.pause()
                # On a GPU a row needs finished events: rows are written once per epoch, without a sync in each step.
                self.log.write(file, epoch=epoch, history=history)
                train_s = time.perf_counter() - started
                history.epochs.append(self._end_epoch(epoch, train_s, history))
                history.epoch_s = 0.0
                # After the evaluation, which is a part of the epoch and may make buffers equal.
                saved = self._checkpoint_due((epoch + 1) * self.steps)
                if saved:
                    self._save(history)
                if not going:
                    break
                self._follow_freeze(history, saved=saved)
        return traffic.mean()

    def _save(self, history: History) -> Path:
        self._wait_for_work()
        return self.checkpoint(self, history)

    def _follow_freeze(self, history: History, *, saved: bool) -> None:
        """Between two epochs. `saved`: there is a checkpoint of this step."""
        done = len(history.losses)
        left = self.train.epochs * self.steps - done
        self.context.recorder.step = done - 1  # the change is counted to the step before it
        for synchroniser in self.synchronisers:
            synchroniser.follow_freeze(
                step_s=median(history.step_ms[-self.steps :]) / 1e3,
                steps_left=left,
                epochs_left=left / self.steps,
                save=partial(self._save, history) if self.train.checkpoint_every and not saved else None,
            )

    def rehearse(self, step: int) -> None:
        """Run one forward and backward pass without an update where the strategy needs it; call before a restore."""
        batch, recorder = self._batch(*self.sampler(step)), self.context.recorder
        recorder.enabled, enabled = False, recorder.enabled
        for synchroniser, optimizer in zip(self.synchronisers, self.optimizers, strict=True):
            if synchroniser.needs_rehearsal:
                synchroniser.backward(synchroniser.module(*batch))
                optimizer.zero_grad(set_to_none=True)
        recorder.enabled = enabled

    def _synchronised_bytes(self) -> int:
        return sum(s.synchronised_bytes() for s in self.synchronisers) if self.context.workers > 1 else 0

    def _checkpoint_due(self, done: int) -> bool:
        every, last = self.train.checkpoint_every, done == self.train.epochs * self.steps
        return every > 0 and (last or not done % every)

    def _wait_for_work(self) -> None:
        """Wait until everything issued has finished: the engine's launches and the GPU's kernels."""
        for synchroniser in self.synchronisers:
            synchroniser.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _step(self, step: int) -> Tensor:
        recorder = self.context.recorder
        part = self.synchronisers[0].part()  # may change the shape of a pipeline, which belongs to no step
        recorder.step = step
        begin = recorder.mark("step")
        with recorder.span("data"):
            epoch, samples = self.sampler(step, part)
            batch = self._batch(epoch, samples)
            view = epoch if self._varies else 0
            if (step + 1) % self.steps:
                self.synchronisers[0].prefetch(lambda: self.sampler(step + 1, part)[1], view=view)
        losses = []
        for synchroniser, optimizer in zip(self.synchronisers, self.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = synchroniser.forward(batch, samples=samples, view=view)
            synchroniser.backward(loss)
            synchroniser.synchronise()
            with recorder.span("update"):
                optimizer.step()
            losses.append(loss.detach())
        recorder.add("step", "step", begin, recorder.mark("step"))
        return torch.stack(losses).sum()

    @property
    def _varies(self) -> bool:
        """Whether samples differ between epochs, as augmentation makes them; a data set that does not say may do so."""
        return bool(getattr(self.workload.train, "varies", True))

    def _batch(self, epoch: int, samples: Tensor) -> tuple[Tensor, ...]:
        batch = self.workload.train.batch(samples, epoch=epoch)
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)

    def _end_epoch(self, epoch: int, train_s: float, history: History) -> dict[str, Any]:
        """Evaluate, and return the epoch's row of the results."""
        started = time.perf_counter()
        for synchroniser in self.synchronisers:
            synchroniser.synchronise_buffers()
        accuracy, test_loss = self._evaluate(self.workload.test, self.train.test_samples)
        test_s = None
        if accuracy is not None:
            history.accuracy, test_s = accuracy, time.perf_counter() - started
        losses = history.losses[epoch * self.steps :]
        row = {"epoch": epoch + 1, "train_s": train_s, "test_s": test_s, "loss": sum(losses) / len(losses)}
        frozen = [s.end_epoch(test_loss) for s in self.synchronisers]
        known = {"test_loss": test_loss} if test_loss is not None else {}
        known |= {"frozen": sum(n for n in frozen if n is not None)} if frozen != [None] * len(frozen) else {}
        return {**row, "accuracy": accuracy, **known}

    def train_accuracy(self) -> float | None:
        """The accuracy on some training samples; None where there is none, or no evaluation was asked for."""
        if self.workload.evaluate is None:
            return None
        return self._evaluate(self.workload.train, min(_TRAIN_SAMPLES, self.train.test_samples))[0]

    @torch.no_grad()
    def _evaluate(self, data: Dataset | None, most: int) -> tuple[float | None, float | None]:
        """The accuracy, and where blocks freeze the mean loss, on the first samples of a data set."""
        score, freezing = self.workload.evaluate, any(s.freeze is not None for s in self.synchronisers)
        if data is None or most <= 0 or (score is None and not freezing):
            return None, None
        modules = torch.nn.ModuleList(phase.module for phase in self.workload.phases).eval()
        right, answers, loss, samples = 0.0, 0, 0.0, 0
        for batch in self._batches(data, most):
            together = self.synchronisers[0].evaluate(batch)
            if together is not None:
                more, count, sum_of_losses = together
                loss += sum_of_losses
            else:
                more, count = (0.0, 0) if score is None else score(batch)
                if freezing:
                    loss += len(batch[0]) * sum(float(phase.module(*batch)) for phase in self.workload.phases)
            right, answers, samples = right + more, answers + count, samples + len(batch[0])
        modules.train()
        return right / answers if answers else None, loss / samples if freezing and samples else None

    def _batches(self, data: Dataset, most: int) -> Iterator[tuple[Tensor, ...]]:
        for indices in torch.arange(min(most, len(data))).split(_EVAL_BATCH):
            yield tuple(t.to(self.device) for t in data.batch(indices))
