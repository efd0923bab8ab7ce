"""torch's C++ reducer (DDP's) over the units of a plan: one bucket per unit, sent in the plan's order.

It averages gradients during the backward pass with no Python per parameter but a list's `append`. Nothing is in flight
after the pass. Each rank adds a value per parameter to the last bucket: whether it used the parameter. So ranks may use
different parameters, which DDP's reducer can do only if it searches the graph in every step.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline._compat.autograd import accumulate
from syncline._compat.ddp import (
    GradBucket,
    check_finished,
    disarm_reducer,
    make_reducer,
    mark_ready,
    remove_reducer,
    set_reducer_hook,
)
from syncline._compat.tensors import storage_users
from syncline.codecs import Merge
from syncline.codecs.coder import cast
from syncline.codecs.requests import adding, halves_exactly
from syncline.engine.launch.bf16_buffers import Bf16Buffers
from syncline.engine.launch.units import Slot, UnitRun
from syncline.engine.weak_callback import weak_callback
from syncline.trace import Recorder

_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By codec, the dtype on the wire; without compression it is the gradient's."""


class BucketReducer:
    """A reducer for fixed units. A pass: `prepare`, the user's backward, `finish` (or `cancel`).

    Thread: the training thread. `_carry` runs in the thread of the backward pass, and its callback in a thread of the
    process group.
    """

    def __init__(
        self, units: Sequence[UnitRun], *, group: dist.ProcessGroup, recorder: Recorder, as_views: bool, by_hook: bool
    ) -> None:
        """`as_views`: gradients are views of the buckets; `by_hook`: buckets go through Python, which adds spans."""
        self.slots: list[Slot] = [slot for unit in units for slot in unit.slots]
        self.as_views, self.by_hook = as_views, by_hook
        self._units, self._group, self._recorder = list(units), group, recorder
        self._parameters: list[Tensor] = [slot.parameter for slot in self.slots]
        self._world = dist.get_world_size(group)
        last = self._parameters[-1]
        self._used = nn.Parameter(torch.zeros(len(self.slots), dtype=last.dtype, device=last.device))
        """Its gradient: by parameter, the share of the ranks that used it. It completes the last bucket."""
        # Weakly: C++ code holds the hooks, and the garbage collector cannot see that.
        self._used.register_hook(weak_callback(self._mark_missing))
        self._missing: Sequence[int] = ()
        self._grads: list[Tensor] = []
        """The gradients that are handed out, over the buckets; the same objects in every pass."""
        self._references: list[int] = []
        """References to each of them while nobody else has it."""
        self._firsts = [0]
        """The first parameter of each bucket."""
        for unit in self._units[:-1]:
            self._firsts.append(self._firsts[-1] + len(unit.slots))
        self._rounded: dict[int, Bf16Buffers] = {}
        """By bucket, what is sent, on a CPU with BF16."""
        self._memory_users: list[int] = []
        """By bucket: users of its memory while nobody else has a gradient, or a view of one."""
        self._reducer = self._make()

    def _make(self) -> Any:
        ends = [*self._firsts[1:], len(self.slots)]
        buckets = [list(range(first, end)) for first, end in zip(self._firsts, ends, strict=True)]
        buckets[-1].append(len(self.slots))
        reducer = make_reducer([*self._parameters, self._used], buckets, self._group, as_views=self.as_views)
        if self.by_hook:
            set_reducer_hook(reducer, weak_callback(self._carry))
        return reducer

    def owns_gradients(self) -> bool:
        """Whether no gradient is the user's, and nobody has kept one of the last pass, so that it may be overwritten.

        A gradient that stayed in place since the last pass is overwritten in the plain loop, too.
        """
        if not self.as_views:
            return True
        grads = [p.grad for p in self._parameters]
        if not self._grads:
            return all(grad is None for grad in grads)
        references = self._count_references()
        for grad, mine, count, known in zip(grads, self._grads, references, self._references, strict=True):
            if grad is not mine if grad is not None else count != known:
                return False
        return self._count_memory_users() == self._memory_users

    def prepare(self) -> None:
        """A backward pass begins: send each bucket when its gradients are complete."""
        disarm_reducer(self._reducer)  # else it collects the order of gradients of all passes, to make other buckets
        self._reducer.prepare_for_backward([])

    def cancel(self) -> None:
        """The pass had no gradients of these parameters."""
        disarm_reducer(self._reducer)

    def finish(self, fired: Sequence[Tensor], *, failed: bool = False) -> None:
        """The backward pass has ended with gradients of these parameters: wait until all gradients are averaged.

        `failed`: it ended with an error, perhaps of a hook, so the reducer may not know the gradients of all of them.
        """
        used = torch.ones_like(self._used)
        absent: list[int] = []
        if failed or len(fired) < len(self._parameters):
            arrived = {id(p) for p in fired}
            missing = [i for i, p in enumerate(self._parameters) if id(p) not in arrived]
            absent = [i for i in missing if self._parameters[i].grad is None]
            used[absent] = 0
            self._missing = range(len(self._parameters)) if failed else missing
        self._used.grad = None
        accumulate(self._used, used)
        check_finished(self._reducer)
        self._missing = ()
        if self.as_views:
            self._hand_out()
        if absent:
            shares: Any = self._used.grad
            for i, share in zip(absent, shares[absent].tolist(), strict=True):
                if not share:
                    self._parameters[i].grad = None  # as in the plain loop: no rank has used it

    def _hand_out(self) -> None:
        """Let every gradient be a plain tensor over its bucket: torch's are views, which have no `detach_()`."""
        if not self._grads:
            self._grads = [p.grad.data for p in self._parameters if p.grad is not None]
            self._references = self._count_references()
        for p, grad in zip(self._parameters, self._grads, strict=True):
            p.grad = grad
        if not self._memory_users:
            self._memory_users = self._count_memory_users()

    def _count_references(self) -> list[int]:
        return [sys.getrefcount(grad) for grad in self._grads]

    def _count_memory_users(self) -> list[int]:
        return [storage_users(self._grads[first]) for first in self._firsts]

    def close(self) -> None:
        """Remove the hooks and free the buckets; gradients stay where they are."""
        remove_reducer(self._reducer)
        del self._reducer

    def _mark_missing(self, _: Tensor) -> None:
        """In a pass of our own: parameters without a new gradient are sent as they are, or as zeros."""
        for index in self._missing:
            mark_ready(self._reducer, index)

    def _carry(self, _: Any, bucket: GradBucket) -> "torch.futures.Future[Any]":
        """Average a bucket with the codec of its unit."""
        unit, buffer, recorder = self._units[bucket.index()], bucket.buffer(), self._recorder
        step = recorder.step
        called, begin = recorder.mark("wait"), recorder.mark("encode")
        part = self._share(bucket.index(), unit.row.codec, buffer)
        start = recorder.mark("exchange")
        if unit.row.codec != "none":
            recorder.add("encode", "encode", begin, start, unit=unit.row.name, step=step)
        work = dist.all_reduce(part, group=self._group, async_op=True)
        assert work is not None

        def arrived(future: "torch.futures.Future[Any]") -> Tensor:
            (total,) = future.value()
            sent = 2 * (self._world - 1) * total.nbytes // self._world
            recorder.add_ending_now("exchange", "allreduce", start, unit=unit.row.name, bytes=sent, step=step)
            if total.data_ptr() != buffer.data_ptr():
                buffer.copy_(total)
            return buffer

        future: torch.futures.Future[Any] = work.get_future().then(arrived)
        recorder.add_issuing(called)
        return future

    def _share(self, index: int, codec: str, buffer: Tensor) -> Tensor:
        """What this rank adds to the sum; it may overwrite the buffer."""
        if codec == "none":
            return buffer.mul_(1 / self._world)
        if codec == "bf16" and buffer.device.type == "cpu" and buffer.dtype == torch.float32:
            # In memory that stays: on a CPU the first writes to new memory take longer than the conversion.
            rounded = self._rounded.setdefault(index, Bf16Buffers())
            return rounded.write([Merge(buffer, cast(torch.bfloat16), own=False)], self._world).tensor
        if codec == "bf16" and buffer.dtype == torch.float32 and halves_exactly(self._world):
            # torch's kernels: ours for large tensors is compiled at its first use, for longer than it saves in a job's
            # first steps.
            return buffer.to(torch.bfloat16).mul_(1 / self._world)
        part, _ = adding(Merge(buffer, cast(_WIRE[codec]), own=False, scratch=True), self._world)
        return part
