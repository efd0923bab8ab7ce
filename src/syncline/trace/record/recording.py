"""One recording of a training loop: installs hooks when the training is known, and writes the trace when it stops."""

import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline._compat import on_every_step, replace_function
from syncline.trace.merge.clocks import host_id, node_name
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.merge.rank_file import write_rank_file
from syncline.trace.record.collectives import hook_collectives, hook_ddp_buckets
from syncline.trace.record.cpu_time import available_cores
from syncline.trace.record.gather import RankRecording, WrittenTrace, gather_trace, recording_store, write_trace
from syncline.trace.record.loop_hooks import LoopHooks, TimedLoader
from syncline.trace.record.module_hooks import find_models, hook_module
from syncline.trace.record.overhead import recording_cost
from syncline.trace.record.postprocess import finish_spans
from syncline.trace.record.recorder import process_recorder
from syncline.trace.record.sampling import IntervalChooser, Sampling, SharedSampling

_ERROR_TIMEOUT_S = 2.0

_log = logging.getLogger("syncline")
_numbers = itertools.count()


class Recording:
    """A recording in progress, or one that has stopped: then `written` says which file it wrote.

    `start` makes it. All hooks are gone after `stop`. Training results are bit-identical with a recording and without.
    """

    def __init__(self, path: Path, *, every: int | None, timeout_s: float, parts: bool) -> None:
        self.path, self.every, self.timeout_s, self.parts = path, every, timeout_s, parts
        self.written: WrittenTrace | None = None
        self.stopped = False
        self.on_start: Callable[[], None] = lambda: None
        """Called in the process that trains, which may be a fork of the one that made this object."""
        self._number, self._process = next(_numbers), os.getpid()
        self._rank, self._world = 0, 1
        self._models: dict[int, weakref.ref[nn.Module]] = {}  # by id: a module may not be hashable
        self._hooks: LoopHooks | None = None
        self._shared_sampling: SharedSampling | None = None
        self._cleanup = ExitStack()
        # Without a model and an optimizer the first optimizer step in this process shows where the training is.
        self._cleanup.callback(on_every_step(lambda *_: None, self._after_any_step))
        self._cleanup.callback(replace_function(dist, "destroy_process_group", self._before_group_ends))

    def __repr__(self) -> str:
        """The path and the state of the recording."""
        state = "stopped" if self.stopped else "recording" if self.started else "waiting for the first optimizer step"
        return f"<Recording to {self.path}: {state}>"

    @property
    def started(self) -> bool:
        """Whether the training is known, so that spans are recorded."""
        return self._hooks is not None

    def add(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record these as well; a step ends with the last optimizer's step.

        Without models, those that the loop calls in the current step are recorded.
        """
        parameters = [p for model in models for p in model.parameters()]
        parameters += [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if not parameters and self._hooks is None:
            return
        hooks = self._hooks or self._start(parameters[0].device)
        for model in models:
            self._add_model(model)
        if optimizers:
            hooks.last_optimizer = weakref.ref(optimizers[-1])
        if not models:
            find_models(hooks, self._add_model)

    def data(self, loader: Iterable[Any]) -> TimedLoader:
        """The same loader with each batch's time recorded: `for x, y in recording.data(loader)`."""
        return TimedLoader(lambda: None if self._hooks is None else self._hooks.recorder, loader)

    def use_sampling(self, sampling: Sampling) -> None:
        """Record these steps from now on."""
        if self._hooks is not None:
            self._hooks.sampling = sampling

    def stop(self, error: BaseException | None = None) -> Path | None:
        """Remove all hooks, gather the ranks' spans, and write the trace.

        Returns the path of the trace on rank 0, of this rank's own file where one was needed. `error` is the exception
        that ended the loop.
        """
        self.stopped = True
        self._cleanup.close()
        hooks = self._hooks
        if hooks is None or self.written is not None or os.getpid() != self._process:
            return None if self.written is None else self.written.path
        hooks.cleanup.close()
        if self._shared_sampling is not None:
            self._shared_sampling.close()
        hooks.recorder.enabled = False
        hooks.wait_for_exchanges()
        self.written = self._write(self._finish(hooks, error), hooks)
        for text in self.written.notes:
            _log.warning("syncline: trace: %s", text)
        return self.written.path

    def stop_quietly(self, error: BaseException | None) -> None:
        """Stop while something else is in progress, such as another exception: a failure here is only logged."""
        try:
            self.stop(error)
        except Exception as second:
            _log.warning("syncline: the trace was not written: %s", second)

    def _finish(self, hooks: LoopHooks, error: BaseException | None) -> RankRecording:
        """This rank's spans and metadata."""
        recorder = hooks.recorder
        recorder.rank = dist.get_rank() if dist.is_initialized() else self._rank
        every = hooks.sampling.effective_interval(recorder.step)
        part = Part(
            recorder.rank,
            finish_spans(recorder.spans(), sampled=every > 1),
            host_id(),
            node=node_name(),
            cores=available_cores(),
            cpu_times=recorder.cpu_times.rows,
            recording_cost=recording_cost(recorder, every=every, hooks=hooks),
        )
        text = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return RankRecording(part, text, tuple(hooks.notes))

    def _write(self, recording: RankRecording, hooks: LoopHooks) -> WrittenTrace:
        in_group = dist.is_initialized()
        attached = any(span.lane == "encode" for span in recording.part.spans)
        metadata: dict[str, Any] = {"strategy": "syncline" if attached else "ddp" if hooks.uses_ddp else "loop"}
        if in_group:
            metadata["backend"] = dist.get_backend()
        world = dist.get_world_size() if in_group else self._world
        if self.parts:
            write_rank_file(recording.part, self.path.parent, world_size=world)
        if world == 1:
            return write_trace([recording], self.path, world_size=1, metadata=metadata)
        if not in_group:
            kept = write_rank_file(recording.part, self.path.parent, world_size=world)
            note = f"the process group was destroyed before the recording stopped: this rank's spans are in {kept}"
            return WrittenTrace(kept, (note, *recording.notes))
        timeout_s = min(self.timeout_s, _ERROR_TIMEOUT_S) if recording.error else self.timeout_s
        return gather_trace(recording, self.path, number=self._number, timeout_s=timeout_s, metadata=metadata)

    def _start(self, device: torch.device) -> LoopHooks:
        self._process = os.getpid()
        self._remember_rank()
        recorder = process_recorder(device, engine=False)
        recorder.restart()
        hooks = LoopHooks(recorder)
        if self.every is None:
            hooks.interval_chooser = IntervalChooser(self._share_sampling)
        else:
            hooks.sampling = Sampling(self.every)
        hooks.install()
        hook_collectives(hooks)
        self._hooks = hooks
        self.on_start()
        return hooks

    def _remember_rank(self) -> None:
        """Store rank and world size: the process group may be gone when the recording stops."""
        if dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def _share_sampling(self, mine: Sampling) -> None:
        """Use rank 0's sampling on all ranks, so that their waits can be matched; alone, this process's."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        decides = not several or dist.get_rank() == 0
        if decides:
            self.use_sampling(mine)
        if several:
            store = recording_store(self._number)
            self._shared_sampling = SharedSampling(store, mine if decides else None, self.use_sampling)

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Without a named model the first step shows that this process trains, and the next one which models."""
        if self._hooks is not None:
            if self._world == 1:
                self._remember_rank()
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters:
            find_models(self._start(parameters[0].device), self._add_model)

    def _add_model(self, model: nn.Module) -> None:
        known = self._models.get(id(model))
        if self._hooks is not None and (known is None or known() is not model):
            self._models[id(model)] = weakref.ref(model)
            hook_module(self._hooks, model)
            hook_ddp_buckets(self._hooks, model)

    def _before_group_ends(self, destroy: Any, group: Any = None, **kwargs: Any) -> Any:
        """Without the process group the other ranks cannot be reached any more."""
        if group is None or group is dist.group.WORLD:
            self.stop_quietly(sys.exc_info()[1])
        return destroy(group, **kwargs)
