"""Backward passes under torch's reducer, in place of `backward.py`: gradients are averaged when `backward()` returns.

No tensor is marked and no thread works: `optimizer.step()` is torch's own, and the job costs what DDP costs.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline._compat.autograd import around_gradients, compiled_autograd, in_backward
from syncline._compat.groups import broadcast_coalesced
from syncline._compat.replace_function import replace_function
from syncline._compat.tensors import swap_owner
from syncline.engine.backward import Backward
from syncline.engine.executors.reducer import BucketReducer
from syncline.engine.inflight.plain_copies import StayingHook
from syncline.engine.launch.collect_gradients import accumulated_twice, sparse_gradient
from syncline.engine.launch.units import UnitRun, as_real
from syncline.engine.protocols import EngineView, PassObserver
from syncline.engine.running_plan import RunningPlan
from syncline.engine.step_state import Phase, StepState
from syncline.errors import UsageError

_CREATE_GRAPH = "backward(create_graph=True) keeps the graph of gradients"
_THREADS = "several threads run backward passes"
_COMPILED = "the backward pass is compiled (compiled autograd)"


class EngineHolder(StayingHook):
    """A hook of the model that does nothing: the model holds its engine, also if the user has dropped it.

    No hook of a parameter may do that: C++ code holds parameters, which the garbage collector cannot see.
    """

    def __init__(self, engine: object) -> None:
        super().__init__()
        self._engine = engine

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before a forward."""


class ReducerBackward:
    """Follows backward passes of the whole process, and lets torch's reducer average this model's gradients.

    Thread: the training thread. If passes run in several threads, which it cannot tell apart, it leaves them to the
    other executor.
    """

    def __init__(
        self,
        engine: EngineView,
        state: StepState,
        running: RunningPlan,
        backward: Backward,
        *,
        began: Callable[[Sequence[bool]], None],
        unsuitable: Callable[[str, Sequence[Tensor]], None],
    ) -> None:
        """`backward`: what is used otherwise; `began`: is told which parameters train.

        `unsuitable(why, parameters)`: this loop needs the other executor. It has to average a pass that has just ended,
        with gradients of these parameters.
        """
        self._engine, self._state, self._running = engine, state, running
        self._backward, self._began, self._unsuitable = backward, began, unsuitable
        self._buffers: list[dict[str, Tensor | None]] = []
        """The buffers of every module that has some."""
        self._sent_memory: list[tuple[int, int, int]] = []
        self._sent_data: list[Tensor] = []
        """The memory of the buffers that were sent last, and views of it."""
        self._reducer: BucketReducer | None = None
        self._as_views = True
        self._fired: list[Tensor] = []
        """Parameters whose gradient was accumulated in this pass."""
        self._in_pass = self._pass_failed = False
        self._thread: int | None = None
        """The thread of all passes so far."""
        self._several_threads = False
        self._hooks: list[Any] = []
        self._holder: Any = None
        self._stop_following: Callable[[], None] | None = None
        self.observer: PassObserver | None = None
        """Sees every pass that is averaged (tuning)."""

    @property
    def active(self) -> bool:
        """Whether torch's reducer averages the gradients."""
        return self._stop_following is not None

    def start(self) -> None:
        """Average gradients from the next pass on, with the units as they are now; nothing is in flight."""
        self.release()
        if any(self._running.trained):
            self._build()
        if self._stop_following is None:
            self._stop_following = _follow(self)
            self._holder = self._engine.model.register_forward_pre_hook(EngineHolder(self))
        self._backward.buffers.broadcast = self._send_buffers
        self._buffers = [m._buffers for m in self._engine.model.modules() if m._buffers]

    def stop(self) -> None:
        """Leave the gradients to the other executor."""
        if self._stop_following is None:
            return
        self._stop_following()
        self._holder.remove()
        self._stop_following = self._backward.buffers.broadcast = None
        self._sent_memory, self._sent_data = [], []
        self.release()

    def finish(self) -> None:
        """End a pass that an error has ended early: gradients that are missing are zeros, as peers wait for them."""
        if self._reducer is None or not self._fired:
            return
        if self._in_pass:
            raise UsageError(
                "gradients are averaged when backward() returns: step the optimizer and zero gradients after that, not"
                " in a hook"
            )
        if self._pass_failed:
            self._average(self._reducer)
        else:
            self._leave("a backward pass was run by other code than torch.autograd.backward")

    def release(self) -> None:
        """Free the buckets, and hold no parameter any more; the next pass makes new ones."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None

    def _build(self) -> BucketReducer:
        self.release()
        engine = self._engine
        units: list[UnitRun] = list(dict.fromkeys(launch.unit for launch in self._running.order))
        self._reducer = BucketReducer(
            units,
            group=engine.groups.rounds[0],
            recorder=engine.recorder,
            as_views=self._as_views,
            by_hook=self._needs_hook(),
        )
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._fired.append) for slot in self._reducer.slots
        ]
        return self._reducer

    def _needs_hook(self) -> bool:
        return self._engine.recorder.enabled or self._running.units[0].row.codec != "none"

    def around(self, run: Callable[[], Any], create_graph: bool) -> Any:
        """A backward pass of this process, of any model."""
        if self._in_pass:
            # Inside another one (checkpointing), or beside it. The thread of a pass inside may be autograd's.
            self._several_threads |= not in_backward()
            return run()
        thread = threading.get_ident()
        self._several_threads |= self._thread not in (None, thread)
        self._thread = thread
        self.finish()
        if not self._backward.exchanges:
            try:
                return run()
            finally:
                self._fired.clear()
        if self._several_threads:
            self._leave(_THREADS)
        elif compiled_autograd():
            self._leave(_COMPILED)  # before the pass: torch refuses to compile one over the reducer's hooks
        trained = [slot.parameter.requires_grad for slot in self._engine.slots]
        if not any(trained) or not self.active:
            return run()
        reducer = self._prepare(trained)
        if self.observer is not None:
            self.observer.pass_begins()
        if not create_graph:
            reducer.prepare()
        self._in_pass = True
        try:
            result = run()
        except BaseException as error:
            self._failed(error, reducer, exchanged=not create_graph)
            raise
        finally:
            self._in_pass = False
        if self._fired and create_graph:
            self._leave(_CREATE_GRAPH)
        elif self._fired:
            self._average(reducer)
        else:
            reducer.cancel()
        return result

    def _leave(self, why: str) -> None:
        """Let the other executor average the gradients of a pass that has ended, and of all passes after it."""
        fired = list(self._fired)
        self._fired.clear()
        self._unsuitable(why, fired)

    def _prepare(self, trained: list[bool]) -> BucketReducer:
        """The reducer of a pass that begins, in which these parameters train."""
        engine = self._engine
        if engine.executor.failure is not None:
            raise engine.executor.failure
        if trained != self._running.trained:
            self._backward.frozen_parameters_changed()
            self.release()
        reducer = self._reducer or self._build()
        if not reducer.owns_gradients():
            # The user's memory must receive the average, or keep the last one: bucket and gradient are separate.
            self._as_views = False
        if reducer.as_views != self._as_views or reducer.by_hook != self._needs_hook():
            reducer = self._build()
        engine.tell_peers(f"step {engine.step}: backward")
        return reducer

    def _average(self, reducer: BucketReducer) -> None:
        """Wait for the averaged gradients and rank 0's buffers."""
        engine, state = self._engine, self._state
        if state.phase is not Phase.BACKWARD:
            state.begin_backward()
        self._began(self._running.trained)
        begin = engine.recorder.mark("wait")
        if self.observer is not None:
            self.observer.pass_computed(self._fired)
        with engine.communicating("the average of the gradients"):
            reducer.finish(self._fired, failed=self._pass_failed)
            self._fired.clear()
            self._pass_failed = False
            engine.recorder.add_blocked(begin, engine.recorder.mark("wait"))
            engine.executor.watch("all", engine.groups.rounds[0])
            if self._backward.buffers.count:
                self._backward.buffers.send()
        if self.observer is not None:
            self.observer.pass_averaged()
        state.end_backward()
        state.settle()
        engine.tell_peers(f"step {engine.step}: after backward")

    def _send_buffers(self) -> list[Tensor]:
        buffers = [b for module in self._buffers for b in module.values() if b is not None and b.numel()]
        memory = [(id(b), b.data_ptr(), b.numel()) for b in buffers]
        if memory != self._sent_memory:
            # Through `data`, with a version of its own: a graph that has still to run may have saved them.
            self._sent_memory, self._sent_data = memory, [as_real(b.data) for b in buffers]
        with self._engine.recorder.span("exchange", "broadcast", unit="buffers"):
            broadcast_coalesced(self._engine.groups.rounds[-1], self._sent_data, 0)
        return buffers

    def _failed(self, error: BaseException, reducer: BucketReducer, *, exchanged: bool) -> None:
        """The user's pass has ended with an error; raises one of the reducer in our words."""
        fired = self._fired
        if not exchanged:
            fired.clear()
        if fired:
            self._pass_failed = True
            self._state.begin_backward()
        if isinstance(error, dist.DistError):
            with self._engine.communicating("the average of the gradients"):
                raise error
        names = {id(slot.parameter): slot.name for slot in reducer.slots}
        if len({id(p) for p in fired}) < len(fired):
            raise accumulated_twice(names[id(fired[-1])]) from error
        for p in fired:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise sparse_gradient(names[id(p)]) from error


def _follow(followed: ReducerBackward) -> Callable[[], None]:
    """Let it follow all backward passes of the process, until the returned function is called or it is collected."""
    found = weakref.ref(followed)

    def around(run: Callable[[], Any], create_graph: bool) -> Any:
        follower = found()
        return run() if follower is None else follower.around(run, create_graph)

    def swap(original: Callable[..., Any], *tensors: Tensor) -> Any:
        follower = found()
        if follower is not None:
            follower.release()  # torch does not swap a tensor that C++ code holds
        return original(*tensors)

    undo = [around_gradients(around), replace_function(swap_owner(), "swap_tensors", swap)]

    def end() -> None:
        for one in undo:
            one()

    return weakref.finalize(followed, end)
