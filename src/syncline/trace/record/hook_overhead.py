"""What the hooks of a recording cost: each kind, timed after the run on tiny things, times how often it was called."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from syncline.trace.record.collectives import noting_group
from syncline.trace.record.loop_hooks import Watch
from syncline.trace.record.module_hooks import see
from syncline.trace.record.overhead import cold_ns
from syncline.trace.record.recorder import Recorder

_Calls = tuple[Callable[[], object], Callable[[], object] | None]
"""Something with hooks, and without; None where that is next to nothing."""


def hooks_cost(watch: Watch, *, device: torch.device) -> tuple[float, tuple[float, float]]:
    """Nanoseconds of the host that the hooks of a recording took in all, and the spans and steps filed meanwhile."""
    total, filed, ended = 0.0, 0.0, 0.0
    for kind, count in watch.counts.items():
        if count:
            cost, spans, steps = _kind(kind, device, watch.own_hook)
            total, filed, ended = total + count * cost, filed + count * spans, ended + count * steps
    return total, (filed, ended)


@lru_cache(maxsize=32)
def _kind(kind: str, device: torch.device, own_hook: bool) -> tuple[float, float, float]:
    """What a hook takes, and the spans and steps that it files."""
    watch = Watch(Recorder(device=device, base=False))
    watch.own_hook = own_hook
    # The recording may end where gradients are off.
    with torch.inference_mode(False), torch.enable_grad():
        with_hooks, without = _KINDS[kind](watch)
        with_hooks()
        spans, steps = watch.recorder.counts()
        return cold_ns(with_hooks, without), spans, steps


def _forward(watch: Watch) -> _Calls:
    plain, seen = nn.Identity(), nn.Identity()
    see(watch, seen)
    return lambda: seen(None), lambda: plain(None)


def _backward(watch: Watch) -> _Calls:
    root = torch.ones((), requires_grad=True) * 1

    def backward() -> None:
        torch.autograd.backward(root, retain_graph=True)

    def seen() -> None:
        watch.around_backward(torch.autograd.backward, root, retain_graph=True)

    return seen, backward


def _update(watch: Watch) -> _Calls:
    optimizer: Any = torch.optim.SGD([torch.ones(1)])

    def seen() -> None:
        watch.before_step(optimizer)
        watch.after_step(optimizer)

    return seen, None


def _exchange(watch: Watch) -> _Calls:
    nobody = _Nobody()
    group, tensors = noting_group(watch, nobody), [torch.ones(1)]  # type: ignore[arg-type]
    return lambda: group.allreduce(tensors), None


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
