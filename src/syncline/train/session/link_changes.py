"""Bandwidth changes during a run (`cluster.changes`): parsed, checked, and applied as rank 0 reports its steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from syncline.cluster.nodes import Cluster, parse_link_bandwidth
from syncline.cluster.quantities import format_bandwidth
from syncline.errors import UsageError
from syncline.results.schema import LinkChange
from syncline.train.config import Config


@dataclass(frozen=True)
class Change:
    """From `step` on (counted from 0), the links carry `bandwidth` bits per second; None means without a limit."""

    step: int
    bandwidth: int | None

    @property
    def text(self) -> str:
        """The change in words."""
        rate = "without a limit" if self.bandwidth is None else f"at {format_bandwidth(self.bandwidth)}"
        return f"{rate} from step {self.step} on"


def parse_changes(config: Config) -> tuple[Change, ...]:
    """The changes in `config`, in order of their steps."""
    asked, train = config.cluster.changes, config.train
    by_epoch = train.device == "cuda" or (train.device == "auto" and torch.cuda.is_available())
    if asked and not config.cluster.nodes:
        raise UsageError("cluster.changes changes the links between nodes: add --nodes N")
    if asked and len(config.compare.scale) > 1:
        raise UsageError("cluster.changes counts the steps of one world size: leave compare.scale out")
    changes = sorted((_change(step, rate) for step, rate in asked.items()), key=lambda change: change.step)
    if len({change.step for change in changes}) < len(changes):
        raise UsageError(f"cluster.changes names a step twice: {', '.join(asked)}; leave one of them out")
    total = train.epochs * train.steps
    for change in changes:
        if total and change.step >= total:
            raise UsageError(f"cluster.changes at step {change.step}: the run has {total} steps, use 1 to {total - 1}")
        if by_epoch and (not train.steps or change.step % train.steps):
            raise UsageError(
                f"cluster.changes at step {change.step}: ranks on a GPU report their steps once per epoch, so use"
                " the first step of an epoch (a multiple of --steps), or --set train.device=cpu"
            )
    return tuple(changes)


def _change(step: str, rate: str) -> Change:
    if not (step.isascii() and step.isdigit() and int(step) >= 1):
        raise UsageError(
            f"cluster.changes.{step}: the key must be a step, 1 or more, such as cluster.changes.20=100Mbit; for"
            " the bandwidth at the start use --bandwidth"
        )
    try:
        return Change(int(step), parse_link_bandwidth(rate or None))
    except UsageError as error:
        raise UsageError(f"cluster.changes.{step}: {error}") from None


def as_rows(changes: Iterable[Change]) -> list[LinkChange]:
    """The changes as rows of the results."""
    return [{"step": change.step, "bandwidth": change.bandwidth} for change in changes]


class LinkSchedule:
    """Sets the links' bandwidth during one run: `begin` at its start, `step_done` after each step."""

    def __init__(self, cluster: Cluster | None, config: Config) -> None:
        self._cluster, self._changes = cluster, parse_changes(config)
        self._first = parse_link_bandwidth(config.cluster.bandwidth or None)
        self._done: list[Change] = []

    def begin(self, step: int) -> None:
        """A run starts or resumes at `step`: set the bandwidth, which the run before may have changed."""
        passed = [change.bandwidth for change in self._changes if change.step <= step]
        self._set(passed[-1] if passed else self._first)

    def step_done(self, step: int) -> None:
        """Rank 0 has finished a step: apply the change of the next one."""
        for change in self._changes:
            if change.step == step + 1 and self._cluster is not None:
                self._set(change.bandwidth)
                self._done.append(change)

    def row(self) -> dict[str, Any]:
        """The changes that were applied, as an entry of the run's results."""
        return {"link_changes": as_rows(self._done)} if self._changes else {}

    def _set(self, bandwidth: int | None) -> None:
        if self._cluster is not None and self._cluster.bandwidth != bandwidth:
            self._cluster.set_bandwidth(bandwidth)
