"""Bandwidth changes during a run (`cluster.changes`): parsed, checked, and applied as rank 0 reports its steps."""

from operator import itemgetter

import torch

from syncline.cluster.nodes import Cluster, parse_link_bandwidth
from syncline.cluster.quantities import format_bandwidth
from syncline.errors import UsageError
from syncline.results.schema import LinkChange
from syncline.train.config import Config


def parse_changes(config: Config) -> list[LinkChange]:
    """The changes in `config`, in order of their steps."""
    asked, train = config.cluster.changes, config.train
    by_epoch = train.device == "cuda" or (train.device == "auto" and torch.cuda.is_available())
    if asked and not config.cluster.nodes:
        raise UsageError("cluster.changes changes the links between nodes: add --nodes N")
    if asked and len(config.compare.scale) > 1:
        raise UsageError("cluster.changes counts the steps of one world size: leave compare.scale out")
    changes = sorted((_change(step, rate) for step, rate in asked.items()), key=itemgetter("step"))
    steps = [change["step"] for change in changes]
    if len(set(steps)) < len(steps):
        raise UsageError(f"cluster.changes names a step twice: {', '.join(asked)}; leave one of them out")
    total = train.epochs * train.steps
    for step in steps:
        if total and step >= total:
            raise UsageError(f"cluster.changes at step {step}: the run has {total} steps, use 1 to {total - 1}")
        if by_epoch and (not train.steps or step % train.steps):
            raise UsageError(
                f"cluster.changes at step {step}: ranks on a GPU report their steps once per epoch, so use"
                " the first step of an epoch (a multiple of --steps), or --set train.device=cpu"
            )
    return changes


def _change(step: str, rate: str) -> LinkChange:
    if not (step.isascii() and step.isdigit() and int(step) >= 1):
        raise UsageError(
            f"cluster.changes.{step}: the key must be a step, 1 or more, such as cluster.changes.20=100Mbit; for"
            " the bandwidth at the start use --bandwidth"
        )
    try:
        return {"step": int(step), "bandwidth": parse_link_bandwidth(rate or None)}
    except UsageError as error:
        raise UsageError(f"cluster.changes.{step}: {error}") from None


def in_words(change: LinkChange) -> str:
    """The change as a part of a sentence."""
    bandwidth = change["bandwidth"]
    rate = "without a limit" if bandwidth is None else f"at {format_bandwidth(bandwidth)}"
    return f"{rate} from step {change['step']} on"


class LinkSchedule:
    """Sets the links' bandwidth during a run that starts or resumes at `first_step`."""

    def __init__(self, cluster: Cluster | None, config: Config, *, first_step: int) -> None:
        self._cluster, self._changes = cluster, parse_changes(config)
        self.applied: list[LinkChange] | None = [] if self._changes else None
        """The changes that were applied so far; None if the run has none."""
        # The run before may have changed it.
        passed = [change["bandwidth"] for change in self._changes if change["step"] <= first_step]
        self._set(passed[-1] if passed else parse_link_bandwidth(config.cluster.bandwidth or None))

    def step_done(self, step: int) -> None:
        """Rank 0 has finished a step: apply the change of the next one."""
        for change in self._changes:
            if change["step"] == step + 1 and self._cluster is not None and self.applied is not None:
                self._set(change["bandwidth"])
                self.applied.append(change)

    def _set(self, bandwidth: int | None) -> None:
        if self._cluster is not None and self._cluster.bandwidth != bandwidth:
            self._cluster.set_bandwidth(bandwidth)
