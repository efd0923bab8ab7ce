"""The training history of one rank: losses, step times and epochs. The loop extends it and checkpoints keep it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from syncline.stats import mean_of_known


@dataclass
class History:
    """The steps that were trained so far, by this process and, after a resume, by earlier ones."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float | None = None
    epoch_s: float = 0.0
    """Seconds of training in the current epoch, at the last checkpoint."""
    resumed_at: list[int] = field(default_factory=list)
    """The first steps of the processes that resumed the run."""

    def to_tensors(self) -> dict[str, Any]:
        """For a checkpoint. Lists that grow with every step become tensors: compact, and exact."""
        lists = {key: torch.tensor(getattr(self, key), dtype=torch.float64) for key in ("losses", "step_ms")}
        return vars(self) | lists

    @classmethod
    def from_tensors(cls, parts: Sequence[Mapping[str, Any]]) -> "History":
        """The history in one rank's checkpoint; of several ranks: mean losses and longest times."""
        return cls(
            losses=torch.stack([part["losses"] for part in parts]).mean(0).tolist(),
            step_ms=torch.stack([part["step_ms"] for part in parts]).amax(0).tolist(),
            epochs=merge_epochs([part["epochs"] for part in parts]),
            epoch_s=max(part["epoch_s"] for part in parts),
            accuracy=mean_of_known([part["accuracy"] for part in parts]),
            resumed_at=list(parts[0]["resumed_at"]),
        )


def merge_epochs(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The epochs over all ranks: the longest times, the mean loss."""
    return [
        {
            "epoch": rows[0]["epoch"],
            "train_s": max(row["train_s"] for row in rows),
            "test_s": max((row["test_s"] for row in rows if row["test_s"] is not None), default=None),
            "loss": sum(row["loss"] for row in rows) / len(rows),
            **{key: mean_of_known([row[key] for row in rows]) for key in ("accuracy", "test_loss") if key in rows[0]},
            **({"frozen": rows[0]["frozen"]} if "frozen" in rows[0] else {}),
        }
        for rows in zip(*ranks, strict=True)
    ]
