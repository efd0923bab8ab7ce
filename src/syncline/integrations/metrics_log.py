"""`MetricsLog`: writes `sync.metrics()` every few steps to TensorBoard, or to any object with `log(dict, step=...)`."""

from os import PathLike, fspath
from typing import Any

from syncline.engine import Sync
from syncline.errors import UsageError

PREFIX = "syncline/"
"""Before the names of our numbers, so that they are a section of their own."""


class MetricsLog:
    """Call it after each optimizer step; rank 0 writes every n-th time.

    to: a folder for TensorBoard, its `SummaryWriter`, or an object with `log(dict, step=...)`, such as a W&B run.
    every: steps between two rows.
    """

    def __init__(self, sync: Sync, to: Any, *, every: int = 20) -> None:
        if every < 1:
            raise UsageError(f"every is {every}: give the number of steps between two rows, 1 or more")
        self._sync, self._every, self._calls = sync, every, 0
        self._own: Any = None
        if sync.rank != 0:
            self._to: Any = None  # nor would an own writer of each rank fit into one folder
            return
        if isinstance(to, str | PathLike):
            to = self._own = _tensorboard(fspath(to))
        elif not hasattr(to, "add_scalar") and not callable(getattr(to, "log", None)):
            raise UsageError(
                f"cannot log to a {type(to).__name__}: give a folder, a SummaryWriter, or an object with"
                " log(dict, step=...)"
            )
        self._to = to

    def __call__(self, **more: float) -> dict[str, float] | None:
        """Count a step. Returns the numbers if they were written, with `more` of your own, such as the loss."""
        self._calls += 1
        if self._to is None or self._calls % self._every:
            return None
        metrics = self._sync.metrics()
        # The engine's step goes on after a checkpoint was loaded; one rank alone counts none.
        step = int(metrics.pop("step")) or self._calls
        row = {f"{PREFIX}{name}": value for name, value in metrics.items()} | more
        if hasattr(self._to, "add_scalar"):
            for name, value in row.items():
                self._to.add_scalar(name, value, step)
        else:
            self._to.log(row, step=step)
        return row

    def close(self) -> None:
        """Close the writer of a folder; others stay open."""
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> "MetricsLog":
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _tensorboard(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("TensorBoard is not installed: pip install 'syncline[tensorboard]'") from None
    return SummaryWriter(folder)
