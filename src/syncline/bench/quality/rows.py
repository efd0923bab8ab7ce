"""Figures of `bench quality` from its rows: differences to dense over the seeds, their intervals, and a verdict."""

import math
from collections.abc import Sequence
from typing import Any

from syncline.bench.quality.tasks import AUTO, DENSE
from syncline.stats import mean, mean_interval

Row = dict[str, Any]
LIMIT = 1.0
"""Points of accuracy, or percent of loss where there is no accuracy, that a fixed codec may lose."""
AUTO_LIMITS = {"points": 0.3, "loss_percent": 0.5}
"""The same for `auto`."""


def summarize(rows: Sequence[Row]) -> list[Row]:
    """One entry for each task, network and codec: means over the seeds that dense has, too."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["task"], row["network"], row["codec"]), []).append(row)
    made = []
    for (task, network, codec), mine in found.items():
        dense = {row["seed"]: row for row in found.get((task, network, DENSE), ())}
        pairs = [(row, dense[row["seed"]]) for row in mine if row["seed"] in dense]
        if pairs:
            made.append({"task": task, "network": network, "codec": codec, **_figures(codec, pairs)})
    return made


def _figures(codec: str, pairs: Sequence[tuple[Row, Row]]) -> Row:
    rows = [row for row, _ in pairs]
    scored = all(row["accuracy"] is not None for row in rows)
    points = [(dense["accuracy"] - row["accuracy"]) * 100 for row, dense in pairs] if scored else None
    percent = [(compared_loss(row) / compared_loss(dense) - 1) * 100 for row, dense in pairs]
    sent = [(dense["bytes_per_step"], row["bytes_per_step"]) for row, dense in pairs if row["bytes_per_step"]]
    # Rows that were added on another machine, or with another torch, have other seconds.
    alike = [pair for pair in pairs if pair[0].get("environment") == pair[1].get("environment")]
    times = [dense["seconds"][-1] / row["seconds"][-1] for row, dense in alike if row["seconds"]]
    made: Row = {
        "seeds": [row["seed"] for row in rows],
        "accuracy": mean([row["accuracy"] for row in rows]) if scored else None,
        "loss": mean([compared_loss(row) for row in rows]),
        "final_loss": {
            phase: mean([_number(row["final_loss"][phase]) for row in rows]) for phase in rows[0]["final_loss"]
        },
        "points": None if points is None else mean(points),
        "points_interval": None if points is None else mean_interval(points),
        "loss_percent": mean(percent),
        "loss_percent_interval": mean_interval(percent),
        "wire_ratio": mean([whole / part for whole, part in sent]) if sent else None,
        "speedup": mean(times) if times else None,
        "chosen": rows[-1]["chosen"],
        "errors": _errors([row["errors"] for row in rows if row.get("errors")]),
    }
    return made | {"verdict": verdict(codec, made)}


def _errors(read: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """The errors that the guard read over all seeds; None if it read none."""
    if not read:
        return None
    largest = max(one["largest"] for one in read)
    return {"budget": read[0]["budget"], "mean": mean([one["mean"] for one in read]), "largest": largest}


def compared_loss(row: Row) -> float:
    """The loss that is compared: on the test samples, or else the last training loss of the last phase."""
    scored = row["accuracy"] is not None
    return _number(row["test_loss"] if scored else list(row["final_loss"].values())[-1])


def _number(loss: float | None) -> float:
    """A loss from a file, which has null for one that is not finite."""
    return math.nan if loss is None else loss


def verdict(codec: str, figures: Row) -> str:
    """Dense, diverged, equal, within the noise, better, within the limit, worse, or unclear.

    `equal`: the interval of the difference to dense contains zero and is within the limit. `within the noise`: the
    interval reaches beyond the limit, and the mean does not. `unclear`: the mean does, so more seeds are needed.
    """
    if codec == DENSE:
        return "dense"
    if not math.isfinite(figures["loss"]):
        return "diverged"
    key = "loss_percent" if figures["points"] is None else "points"
    lost, interval = figures[key], figures[f"{key}_interval"]
    limit = AUTO_LIMITS[key] if codec.partition("(")[0] == AUTO else LIMIT
    if interval is None:
        return "one seed"
    if interval[1] < 0:
        return "better"
    if lost <= limit:
        within = "equal" if interval[1] <= limit else "within the noise"
        return within if interval[0] <= 0 else "within the limit"
    return "worse" if interval[0] > 0 else "unclear"
