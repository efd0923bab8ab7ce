"""A rank's clock in a run: how far it is from rank 0's, when the run begins and when it ends."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncline._compat import new_group
from syncline.trace.merge.clocks import Clock, measure_clocks, with_drift


class RunClock:
    """This rank's clock from the begin of a run to its end; made and finished by all ranks together."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._first: Clock | None = None
        if not dist.is_initialized():
            return
        if dist.get_backend() != "gloo":
            ranks = range(dist.get_world_size())
            self._group = new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        self._first = self._now()

    def finish(self) -> dict[str, Any] | None:
        """Measure again: the clock in between, as plain data; None for a rank that is alone."""
        if self._first is None:
            return None
        return asdict(with_drift(self._first, self._now()))

    def _now(self) -> Clock:
        return measure_clocks(self._group)[dist.get_rank()]
