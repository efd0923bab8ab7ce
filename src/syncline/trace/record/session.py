"""Recording in any training loop: `with recording(model, optimizer): ...`, or `start()` and `stop()`.

Hooks are set when it starts and are all gone when it stops; results are the same to the bit with it and without.
"""

import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline._compat import on_every_step, replace_function
from syncline.errors import UsageError
from syncline.trace.merge.clocks import host
from syncline.trace.merge.merge import Part
from syncline.trace.record.collectives import see_buckets, see_collectives
from syncline.trace.record.cpu_time import cores
from syncline.trace.record.data_loader import Loaded
from syncline.trace.record.gather import Seen, Written, collect, write_own, write_trace
from syncline.trace.record.hook_overhead import hooks_cost
from syncline.trace.record.loop_hooks import Watch
from syncline.trace.record.module_hooks import search, see
from syncline.trace.record.overhead import facts, unknown
from syncline.trace.record.postprocess import finish_spans
from syncline.trace.record.recorder import Recorder, process_recorder
from syncline.trace.record.sampling import Pace, Sampling
from syncline.trace.record.sampling_agreement import Agreement, agree

FOLDER = "syncline-trace"
FILE = "trace.json.gz"
_CRASH_S = 2.0

_log = logging.getLogger("syncline")
_numbers = itertools.count()
_active: "Recording | None" = None

Models = nn.Module | Sequence[nn.Module] | None
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Recording:
    """A recording under way, or one that has ended: then `written` says what it left."""

    def __init__(self, path: Path, *, every: int | None, timeout_s: float, parts: bool) -> None:
        self.path, self.every, self.timeout_s, self.parts = path, every, timeout_s, parts
        self.written: Written | None = None
        self._number, self._process = next(_numbers), os.getpid()
        self._rank, self._world = 0, 1
        self._models: dict[int, weakref.ref[nn.Module]] = {}  # by id: a module may be no key
        self.when_begun: Callable[[], None] = lambda: None
        """Called in the process that trains, which may be a fork of the one that made this."""
        self._watch: Watch | None = None
        self._recorder: Recorder | None = None
        self._agreement: Agreement | None = None
        self._explicit = False
        # Without a model and an optimizer the first step that anybody takes says where the training is.
        self._undo = [on_every_step(lambda *_: None, self._first_step)]
        self._undo.append(replace_function(dist, "destroy_process_group", self._before_the_end))

    @property
    def begun(self) -> bool:
        """Whether it is known what to record."""
        return self._watch is not None

    def add(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record these, too; the last optimizer's step ends a step."""
        parameters = [p for model in models for p in model.parameters()]
        parameters += [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if not parameters and self._watch is None:
            return
        watch = self._watch or self._begin(parameters[0].device)
        for model in models:
            self._see(model)
        for optimizer in optimizers:
            watch.ends_steps(optimizer)

    def data(self, loader: Iterable[Any]) -> "Loaded":
        """The same loader, with the time that each batch takes recorded: `for x, y in recording.data(loader)`."""
        self._explicit = True
        if self._watch is not None:
            self._watch.explicit = True
        return Loaded(lambda: self._recorder, loader)

    def stop(self, error: BaseException | None = None) -> Path | None:
        """Take all hooks away, bring the ranks together, write; the trace's path on rank 0. `error` ended the loop."""
        global _active
        if _active is self:
            _active = None
        undo, self._undo = self._undo, []
        for remove in reversed(undo):
            remove()
        watch, recorder = self._watch, self._recorder
        if watch is None or recorder is None or self.written is not None or os.getpid() != self._process:
            return None if self.written is None else self.written.path
        watch.close()
        if self._agreement is not None:
            self._agreement.close()
        recorder.enabled = False
        watch.land()
        self.written = self._write(self._seen(watch, recorder, error), watch)
        for text in self.written.notes:
            _log.warning("syncline: trace: %s", text)
        return self.written.path

    def stop_quietly(self, error: BaseException | None) -> None:
        """Stop where something else is going on: what goes wrong here must not take its place."""
        try:
            self.stop(error)
        except Exception as second:
            _log.warning("syncline: the trace was not written: %s", second)

    def _seen(self, watch: Watch, recorder: Recorder, error: BaseException | None) -> Seen:
        recorder.rank = dist.get_rank() if _together() else self._rank
        every = watch.sampling.used(recorder.step)
        spans = finish_spans(recorder.spans(), sampled=every > 1)
        notes = list(watch.notes)
        try:
            hooks_ns, filed = hooks_cost(watch, device=recorder.device)
            cost = facts(recorder, every=every, hooks_ns=hooks_ns, by_hooks=filed)
        except Exception as failed:  # whatever state the loop has left torch in, the trace is written
            cost = unknown(recorder, every=every)
            notes.append(f"what recording cost is not known: {type(failed).__name__}: {failed}".splitlines()[0][:200])
        part = Part(recorder.rank, spans, host())
        crashed = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Seen(part, cores(), recorder.usage.rows, cost, crashed, tuple(notes))

    def _write(self, seen: Seen, watch: Watch) -> Written:
        together = _together()
        ours = any(span.lane == "encode" for span in seen.part.spans)
        about: dict[str, Any] = {"strategy": "syncline" if ours else "ddp" if watch.ddp else "loop"}
        if together:
            about["backend"] = dist.get_backend()
        world = dist.get_world_size() if together else self._world
        if self.parts:
            write_own(seen, self.path, world_size=world)
        if world > 1 and not together:
            kept = write_own(seen, self.path, world_size=world)
            return Written(
                kept, (f"the process group was gone before the recording ended: {kept} has this rank's", *seen.notes)
            )
        if world == 1:
            return write_trace([seen], self.path, world_size=1, about=about)
        timeout_s = min(self.timeout_s, _CRASH_S) if seen.crashed else self.timeout_s
        return collect(seen, self.path, number=self._number, timeout_s=timeout_s, about=about)

    def _begin(self, device: torch.device) -> Watch:
        self._process = os.getpid()
        self._look_around()
        recorder = process_recorder(device, engine=False)
        recorder.restart()
        watch = Watch(recorder)
        if self.every is None:
            watch.pace = Pace(self._decide)
        else:
            watch.sampling = Sampling(self.every)
        watch.explicit = self._explicit
        watch.open()
        if dist.is_available():
            see_collectives(watch)
        self._watch, self._recorder = watch, recorder
        self.when_begun()
        return watch

    def _look_around(self) -> None:
        """Remember the place among the ranks: at the end the group may be gone."""
        if _together():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def _decide(self, mine: Sampling) -> None:
        """The first steps are over, and this rank would go on like this."""

        def use(agreed: Sampling) -> None:
            if self._watch is not None:
                self._watch.sampling = agreed

        self._agreement = agree(mine, use, number=self._number)

    def _first_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Somebody has stepped, and no model was named: the next step shows which there are."""
        if self._watch is not None:
            if self._world == 1:
                self._look_around()
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters:
            return
        search(self._begin(parameters[0].device), self._see)

    def _see(self, model: nn.Module) -> None:
        known = self._models.get(id(model))
        if self._watch is not None and (known is None or known() is not model):
            self._models[id(model)] = weakref.ref(model)
            see(self._watch, model)
            see_buckets(self._watch, model)

    def search(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """No model was named: look which are called in the first step."""
        self.add([], optimizers)
        if self._watch is not None:
            search(self._watch, self._see)

    def _before_the_end(self, destroy: Any, group: Any = None, **kwargs: Any) -> Any:
        """With the process group the way to rank 0 ends."""
        if group is None or group is dist.group.WORLD:
            self.stop_quietly(sys.exc_info()[1])
        return destroy(group, **kwargs)


def start(
    path: str | Path | None = None,
    *,
    model: Models = None,
    optimizer: Optimizers = None,
    every: int | None = None,
    timeout: float = 30.0,
    parts: bool = False,
) -> Recording:
    """Record this process's training until `stop()`; every rank calls it.

    path: the trace, or a folder for it; `syncline-trace` by default.
    model: what the loop calls, one or several; by default the first recorded step shows which there are.
    optimizer: one or several; the step of the last one ends a step. By default the first one that steps.
    every: record each n-th step only; 1 is all. By default all of the first steps, and then as seldom as keeps
        recording well below 1% of the time.
    timeout: seconds that `stop` waits for the other ranks.
    parts: each rank keeps a file of its own as well.
    """
    global _active
    if every is not None and every < 1:
        raise UsageError(f"every is {every}: each n-th step is recorded, 1 or more")
    if _active is not None and _active.begun:
        raise UsageError("a recording is under way: call syncline.trace.stop() first (SYNCLINE_TRACE starts one, too)")
    models, optimizers = _several(model, nn.Module, "model"), _several(optimizer, torch.optim.Optimizer, "optimizer")
    if _active is not None:
        _active.stop()
    made = _active = Recording(_file(path), every=every, timeout_s=timeout, parts=parts)
    if models:
        made.add(models, optimizers)
    elif optimizers:
        made.search(optimizers)
    return made


def stop() -> Path | None:
    """End the recording that `start` began: the trace's path on rank 0, this rank's own file where one was needed."""
    return None if _active is None else _active.stop()


def current() -> Recording | None:
    """The recording under way."""
    return _active


@contextmanager
def recording(
    model: Models = None,
    optimizer: Optimizers = None,
    *,
    path: str | Path | None = None,
    every: int | None = None,
    timeout: float = 30.0,
    parts: bool = False,
) -> Iterator[Recording]:
    """Record a block, as `start` and `stop` do; an error in it is written down with what was recorded before."""
    made = start(path, model=model, optimizer=optimizer, every=every, timeout=timeout, parts=parts)
    try:
        yield made
    except BaseException as error:
        made.stop_quietly(error)
        raise
    made.stop()


def _several(given: Any, kind: type, what: str) -> list[Any]:
    made = [] if given is None else [given] if isinstance(given, kind) else list(given)
    for one in made:
        if not isinstance(one, kind):
            raise UsageError(f"{what} is a {type(one).__name__}: give a torch {kind.__name__}, or several")
    return made


def _file(path: str | Path | None) -> Path:
    asked = Path(path or FOLDER)
    return asked if asked.name.endswith((".json", ".json.gz")) else asked / FILE


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
