"""What a recording cost: each kind of hook, timed after the run on tiny things, times how often it was called."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from syncline.trace.cost import call_costs
from syncline.trace.recorder import Recorder
from syncline.trace.recording_hooks import Watch
from syncline.trace.recording_models import see
from syncline.trace.recording_wire import noting_group

_CALLS, _ROUNDS = 50, 5


def hooks_ns(watch: Watch, *, device: torch.device) -> float:
    """Nanoseconds of the host in all, without those of the spans that the hooks filed.

    What a call takes of this thread with hooks, less what it takes without, in the median of a few rounds.
    """
    filing = call_costs(device)
    total = 0.0
    for kind, measure in _KINDS.items():
        if watch.counts[kind]:
            scratch = Watch(Recorder(device=device, base=False))
            scratch.ddp = watch.ddp
            cost = measure(scratch)
            spans, steps = scratch.recorder.counts()
            total += watch.counts[kind] * max(0.0, cost - (spans * filing[0] + steps * filing[1]) / (_CALLS * _ROUNDS))
    return total


def _forward(watch: Watch) -> float:
    plain, seen = nn.Identity(), nn.Identity()
    see(watch, seen)
    return _difference(lambda: seen(None), lambda: plain(None))


def _backward(watch: Watch) -> float:
    root = torch.ones((), requires_grad=True) * 1

    def backward() -> None:
        torch.autograd.backward(root, retain_graph=True)

    def seen() -> None:
        watch.around_backward(torch.autograd.backward, root, retain_graph=True)

    return _difference(seen, backward)


def _update(watch: Watch) -> float:
    optimizer: Any = torch.optim.SGD([torch.ones(1)])

    def seen() -> None:
        watch.before_step(optimizer)
        watch.after_step(optimizer)

    return _difference(seen, lambda: None)


def _exchange(watch: Watch) -> float:
    nobody = _Nobody()
    group, tensors = noting_group(watch, nobody), [torch.ones(1)]  # type: ignore[arg-type]
    return _difference(lambda: group.allreduce(tensors), lambda: nobody.allreduce(tensors))


_KINDS = {"forward": _forward, "backward": _backward, "update": _update, "exchange": _exchange}


class _Nobody:
    """A group of one that answers at once."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: Any, options: Any = None) -> "_Nobody":
        return self

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


def _difference(with_hooks: Callable[[], object], without: Callable[[], object]) -> float:
    rounds = sorted(_time(with_hooks) - _time(without) for _ in range(_ROUNDS))
    return max(0.0, rounds[_ROUNDS // 2])


def _time(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    for _ in range(_CALLS):
        call()
    return (time.thread_time_ns() - begin) / _CALLS
