"""One recording of a training loop: installs hooks when the training is known, and writes the trace when it stops."""

import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline._compat.groups import Store
from syncline._compat.optimizers import on_every_step
from syncline._compat.replace_function import replace_function
from syncline.trace.merge.clocks import host_id, node_name
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.record.collectives import hook_collectives
from syncline.trace.record.cpu_time import available_cores
from syncline.trace.record.crash_watch import CrashWatch
from syncline.trace.record.gather import (
    RankRecording,
    WrittenTrace,
    first_line,
    gather_trace,
    keep_rank_file,
    recording_store,
    write_trace,
)
from syncline.trace.record.known_models import KnownModels
from syncline.trace.record.loop_hooks import LoopHooks, TimedLoader
from syncline.trace.record.overhead import recording_cost
from syncline.trace.record.postprocess import finish_spans
from syncline.trace.record.recorder import Recorder, process_recorder
from syncline.trace.record.sampling import IntervalChooser, Sampling, SharedSampling
from syncline.trace.record.straggler_watch import StragglerWatch, watch_requested

_ERROR_TIMEOUT_S = 4.0

_log = logging.getLogger("syncline")
_numbers = itertools.count()


class Recording:
    """A recording in progress, or one that has stopped: then `written` says which file it wrote.

    `start` makes it; without a path it writes no trace. All hooks are gone after `stop`. Training results are
    bit-identical with a recording and without.
    """

    def __init__(self, path: Path | None, *, every: int | None, timeout_s: float, parts: bool) -> None:
        self.path, self.every, self.timeout_s, self.parts = path, every, timeout_s, parts
        self.written: WrittenTrace | None = None
        self.stopped = False
        self.automatic = False
        """Whether the environment asked for it: a recording that the script starts ends it."""
        self.on_start: Callable[[], None] = lambda: None
        """Called in the process that trains, which may be a fork of the one that made this object."""
        self._number, self._process = next(_numbers), os.getpid()
        self._rank, self._world = 0, 1
        self._known: KnownModels | None = None
        self._hooks: LoopHooks | None = None
        self._shared_sampling: SharedSampling | None = None
        self._crash_watch: CrashWatch | None = None
        self._straggler_watch: StragglerWatch | None = None
        self._publishing, self._published = threading.Lock(), False
        self._cleanup = ExitStack()
        # Without a model and an optimizer the first optimizer step in this process shows where the training is.
        self._cleanup.callback(on_every_step(lambda *_: None, self._after_any_step))
        self._cleanup.callback(replace_function(dist, "destroy_process_group", self._before_group_ends))

    def __repr__(self) -> str:
        """The path and the state of the recording."""
        state = "stopped" if self.stopped else "recording" if self.started else "waiting for the first optimizer step"
        return f"<Recording to {self.path or 'no file'}: {state}>"

    @property
    def started(self) -> bool:
        """Whether the training is known, so that spans are recorded."""
        return self._hooks is not None

    def add(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record these as well, and all other models that the loop calls in the current step.

        A step ends with the last optimizer's step.
        """
        parameters = [p for model in models for p in model.parameters()]
        parameters += [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if not parameters and self._hooks is None:
            return
        hooks = self._hooks or self._start(parameters[0].device)
        assert self._known is not None
        for model in models:
            self._known.add(model)
        if optimizers:
            hooks.last_optimizer = weakref.ref(optimizers[-1])
        self._known.find()

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
        that ended the loop. A failure here is only logged: a recording must not end the script that it observes.
        """
        already, self.stopped = self.stopped, True
        hooks = self._hooks
        if not already:
            try:
                self._cleanup.close()
                if hooks is not None:
                    hooks.cleanup.close()
            except Exception as second:
                _log.warning("syncline: trace: a hook could not be removed: %s", first_line(second))
        if not already and hooks is not None and os.getpid() == self._process:
            for helper in (self._shared_sampling, self._crash_watch, self._straggler_watch):
                if helper is not None:
                    helper.close()
            hooks.recorder.enabled = False
            if self.path is not None:
                hooks.wait_for_exchanges()
                self._publish(hooks, error)
        return None if self.written is None else self.written.path

    def give_up(self, error: Exception) -> None:
        """End the recording because a part of it has failed; the trace gets a note and everything before."""
        text = f"the recording ended early, because a part of it failed: {type(error).__name__}: {first_line(error)}"
        _log.warning("syncline: trace: %s", text)
        if self._hooks is not None:
            self._hooks.notes.append(text)
        self.stop()

    def _publish(self, hooks: LoopHooks, error: BaseException | None, *, peer_failed: bool = False) -> None:
        """Write the trace, once: when the recording stops, or in another thread when a peer has failed."""
        if not self._publishing.acquire(timeout=self.timeout_s + _ERROR_TIMEOUT_S):
            _log.warning("syncline: the trace is not written yet: another thread still waits for the GPU")
            return
        try:
            if not self._published:
                self._published = True
                self.written = self._write(self._finish(hooks, error, peer_failed=peer_failed), hooks)
                for text in self.written.notes:
                    _log.warning("syncline: trace: %s", text)
        except Exception as second:
            _log.warning("syncline: the trace was not written: %s: %s", type(second).__name__, first_line(second))
        finally:
            self._publishing.release()

    def _finish(self, hooks: LoopHooks, error: BaseException | None, *, peer_failed: bool) -> RankRecording:
        """This rank's spans and metadata."""
        recorder = hooks.recorder
        recorder.rank = dist.get_rank() if dist.is_initialized() else self._rank
        hooks.notes += [] if self._known is None else self._known.missing()
        every = hooks.sampling.effective_interval(recorder.step)
        part = Part(
            recorder.rank,
            finish_spans(recorder.spans(), sampled=every > 1),
            host_id(),
            node=node_name(),
            cores=available_cores(),
            cpu_times=recorder.cpu_times.rows,
            # After an error nobody should wait for the timing of hooks.
            recording_cost=recording_cost(recorder, every=every, hooks=hooks, timed=error is None and not peer_failed),
        )
        text = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return RankRecording(part, text, tuple(hooks.notes), peer_failed)

    def _write(self, recording: RankRecording, hooks: LoopHooks) -> WrittenTrace:
        assert self.path is not None
        in_group = dist.is_initialized()
        attached = any(span.lane == "encode" for span in recording.part.spans)
        metadata: dict[str, Any] = {"strategy": "syncline" if attached else "ddp" if hooks.uses_ddp else "loop"}
        if in_group:
            metadata["backend"] = dist.get_backend()
        world = dist.get_world_size() if in_group else self._world
        if self.parts:
            keep_rank_file(recording.part, self.path, world_size=world)
        if world == 1:
            return write_trace([recording], self.path, world_size=1, metadata=metadata)
        if not in_group:
            kept = keep_rank_file(recording.part, self.path, world_size=world)
            note = f"the process group was destroyed before the recording stopped: this rank's spans are in {kept}"
            return WrittenTrace(kept, (note, *recording.notes))
        timeout_s = min(self.timeout_s, _ERROR_TIMEOUT_S) if recording.failed else self.timeout_s
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
        self._hooks, self._known = hooks, KnownModels(hooks, self.give_up)
        self._watch_stragglers(recorder)
        self.on_start()
        return hooks

    def _remember_rank(self) -> None:
        """Store rank and world size: the process group may be gone when the recording stops."""
        if dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
            store = self._store()
            if self._world > 1 and store is not None and self._crash_watch is None and self.path is not None:
                self._crash_watch = CrashWatch(store, self._after_crash)

    def _watch_stragglers(self, recorder: Recorder) -> None:
        store = self._store() if watch_requested() else None
        if store is not None and self._world > 1 and self._straggler_watch is None:
            self._straggler_watch = StragglerWatch(store, recorder, rank=self._rank, world=self._world)

    def _after_crash(self) -> None:
        """A peer's loop has failed, so this rank's loop will not come far."""
        if self._straggler_watch is not None:
            self._straggler_watch.close()  # it reads the same spans
        if self._hooks is not None:
            self._publish(self._hooks, None, peer_failed=True)

    def _store(self) -> Store | None:
        """The store of this recording; None without a process group, and for backends that use none."""
        try:
            return recording_store(self._number) if dist.is_initialized() else None
        except (RuntimeError, ValueError):
            return None

    def _share_sampling(self, mine: Sampling) -> None:
        """Use rank 0's sampling on all ranks, so that their waits can be matched; alone, this process's."""
        store = self._store() if self._world > 1 else None
        decides = store is None or self._rank == 0
        if decides:
            self.use_sampling(mine)
        if store is not None:
            self._shared_sampling = SharedSampling(store, mine if decides else None, self.use_sampling)

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Without a named model the first step shows that this process trains, and the next one which models."""
        try:
            if self._hooks is None:
                first = next((p for group in optimizer.param_groups for p in group["params"]), None)
                if first is not None:
                    self._start(first.device)
            elif self._world == 1:
                self._remember_rank()
                self._watch_stragglers(self._hooks.recorder)
            if self._known is not None:
                self._known.optimizer_stepped(optimizer)
        except Exception as error:
            self.give_up(error)

    def _before_group_ends(self, destroy: Any, group: Any = None, **kwargs: Any) -> Any:
        """Without the process group the other ranks cannot be reached any more."""
        if group is None or group is dist.group.WORLD:
            self.stop(sys.exc_info()[1])
        return destroy(group, **kwargs)
