"""Rows of `bench pipeline` from the records of all ranks and seeds: time to the same accuracy, speed and memory."""

from collections.abc import Sequence
from typing import Any

from syncline.stats import mean, mean_of_known

TOLERANCE = 0.005
"""Half a point: the accuracy to reach is that of the reference minus this."""
Records = Sequence[Sequence[dict[str, Any]]]
"""By seed and rank, the records by way."""


def rows_of(names: Sequence[str], records: Records, *, reference: str) -> list[dict[str, Any]]:
    """One row for each way, with two accuracies to reach, means of the seeds.

    `to_accuracy`: the reference's last one minus half a point. `to_common`: the highest that the way and the reference
    both reach, which is the lower of their last ones.
    """
    last = mean_of_known([ranks[0][reference]["epochs"][-1]["accuracy"] for ranks in records])
    goal = None if last is None else last - TOLERANCE
    made = [_row(name, records, goal) for name in names]
    base = next(row for row in made if row["name"] == reference)
    for row in made:
        row["speedup"] = _ratio(base["seconds"], row["seconds"])
        row["speedup_to_accuracy"] = _ratio(base["seconds_to_accuracy"], row["seconds_to_accuracy"])
        points = [_difference(a, b) for a, b in zip(row["accuracies"], base["accuracies"], strict=True)]
        row["points"] = mean_of_known(points)
        ends = row["accuracy_by_epoch"][-1], base["accuracy_by_epoch"][-1]
        row["common_accuracy"] = None if None in ends else min(ends)
        row["seconds_to_common"], there = (
            mean_of_known(_times_to(row["common_accuracy"], one["accuracy_by_epoch"], _records(one["name"], records)))
            for one in (row, base)
        )
        row["speedup_to_common"] = _ratio(there, row["seconds_to_common"])
    return made


def epochs_to(goal: float | None, accuracies: Sequence[float | None]) -> int | None:
    """Epochs after which the accuracy is at least the goal and stays there; None if it is below at the end.

    >>> epochs_to(0.9, [0.5, 0.9, 0.8, 0.91, 0.9]), epochs_to(0.9, [0.95, 0.8])
    (4, None)
    """
    if goal is None:
        return None
    below = [number for number, accuracy in enumerate(accuracies, 1) if accuracy is None or accuracy < goal]
    reached = max(below, default=0) + 1
    return reached if reached <= len(accuracies) else None


def payback(reshape: dict[str, Any], epochs: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of training after which a reshape has gained what it cost; None where the next epoch is not faster."""
    before, after = (epochs[reshape["epoch"] + at]["train_s"] for at in (-1, 0))
    gain = before - after
    return None if gain <= 0 else reshape["cost_s"] * after / gain


def _row(name: str, records: Records, goal: float | None) -> dict[str, Any]:
    """Means over the seeds; memory is that of the rank with the most."""
    mine = _records(name, records)
    accuracies = [record["epochs"][-1]["accuracy"] for record in mine]
    curve = [
        mean_of_known([epoch["accuracy"] for epoch in epochs])
        for epochs in zip(*(r["epochs"] for r in mine), strict=True)
    ]
    times = _times_to(goal, curve, mine)
    first = mine[0]
    return {
        "name": name,
        "seconds_to_accuracy": mean_of_known(times),
        "epochs_to_accuracy": epochs_to(goal, curve),
        "accuracy": mean_of_known(accuracies),
        "samples_per_s": mean([record["samples_per_s"] for record in mine]),
        "peak_memory_bytes": max(rank[name]["peak_memory_bytes"] for ranks in records for rank in ranks),
        "reshapes": [reshape | {"payback_s": payback(reshape, first["epochs"])} for reshape in first["reshapes"]],
        "seconds": mean([record["seconds"] for record in mine]),
        "set_up_s": mean([record["set_up_s"] for record in mine]),
        "accuracies": accuracies,
        "accuracy_by_epoch": curve,
        "seconds_by_seed": [record["seconds"] for record in mine],
        "seconds_to_accuracy_by_seed": times,
        "epochs": first["epochs"],
    }


def _records(name: str, records: Records) -> list[dict[str, Any]]:
    """The first rank's record of a way, by seed."""
    return [ranks[0][name] for ranks in records]


def _times_to(
    goal: float | None, curve: Sequence[float | None], records: Sequence[dict[str, Any]]
) -> list[float | None]:
    """By seed, the seconds until the mean accuracy has reached the goal; None if it does not."""
    reached = epochs_to(goal, curve)
    return [None if reached is None else _seconds_after(reached, record) for record in records]


def _seconds_after(count: int, record: dict[str, Any]) -> float:
    """Seconds of training until the end of an epoch, without the freeze and the reshape that follow it."""
    epochs = record["epochs"]
    before = float(epochs[count - 2]["seconds"] if count > 1 else record["set_up_s"])
    return before + float(epochs[count - 1]["train_s"])


def _ratio(base: float | None, value: float | None) -> float | None:
    return None if base is None or value is None else base / value


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else (a - b) * 100
