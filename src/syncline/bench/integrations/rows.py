"""Rows and table of `bench integrations`: step times, ratios to the rival by round, and losses."""

from collections.abc import Iterable, Sequence
from typing import Any

from syncline.bench.integrations import fsdp, trainer
from syncline.bench.timing import ratios, summarize
from syncline.stats import mean

HEADINGS = ("what", "network", "way", "step ms", "rival / way", "last loss")
LOSS_HEADINGS = ("way", "mean loss by seed", "difference to dense, %", "range")
_LAST = 5
"""The loss of a run is the mean of so many last steps."""


def fsdp_rows(records: Sequence[dict[str, Any]], options: fsdp.Options) -> list[dict[str, Any]]:
    """A row for each way: step times, and how much faster it is than hybrid sharding with BF16 reduce, by round."""
    times = {way: _mean_of_ranks(record["times"][way] for record in records) for way in options.ways}
    made = []
    for way in options.ways:
        losses = _mean_of_ranks(record["losses"][way] for record in records)
        made.append(
            {
                "what": f"FSDP2, {records[0]['gradient_bytes'] / 1e6:.0f} MB of gradients, {options.tokens} words",
                "network": options.bandwidth,
                "way": way,
                "step_ms": summarize(times[way]),
                "rival": fsdp.HYBRID_BF16,
                "gain": summarize(ratios(times[fsdp.HYBRID_BF16], times[way])),
                "loss": [mean(losses[-_LAST:])],
            }
        )
    return made


def fsdp_losses(records: Sequence[dict[str, Any]], options: fsdp.Options) -> list[dict[str, Any]]:
    """A row for each way: its mean loss over all steps by seed, and how far that is from dense hybrid sharding's."""
    seeds = range(len(options.loss_seeds))
    found = {way: [mean([mean(record[way][at]) for record in records]) for at in seeds] for way in options.trained}
    made = []
    for way, losses in found.items():
        above = [100 * (mine / dense - 1) for mine, dense in zip(losses, found[fsdp.HYBRID], strict=True)]
        made.append({"way": way, "steps": options.loss_steps, "loss": losses, "above_dense_percent": above})
    return made


def loss_table(result: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings and cells: the losses of each way beside those of dense hybrid sharding."""
    lines = []
    for row in result["losses"]:
        above = row["above_dense_percent"]
        losses = " ".join(f"{loss:.3f}" for loss in row["loss"])
        lines.append([row["way"], losses, f"{mean(above):+.2f}", f"{min(above):+.2f} to {max(above):+.2f}"])
    return LOSS_HEADINGS, lines


def trainer_rows(records: Sequence[dict[str, Any]], options: trainer.Options, network: str) -> list[dict[str, Any]]:
    """Two rows for each model. A run's time is the mean of all steps but the first: `auto` pays for its tuning."""
    made = []
    for model in options.models:
        runs = {way: [record[model][way] for record in records] for way in (trainer.DDP, trainer.AUTO)}
        times = {
            way: _mean_of_ranks([mean(run["step_ms"][1:]) for run in ranks] for ranks in runs[way]) for way in runs
        }
        for way, ranks in runs.items():
            tuned = _mean_of_ranks(
                [mean(run["step_ms"][-max(1, options.steps // 3) :]) for run in rank] for rank in ranks
            )
            made.append(
                {
                    "what": f"Trainer, {model}",
                    "network": network or "no limit",
                    "way": way,
                    "step_ms": summarize(times[way]),
                    "last_third_ms": summarize(tuned),
                    "rival": trainer.DDP,
                    "gain": summarize(ratios(times[trainer.DDP], times[way])),
                    "loss": [mean(run["losses"][-_LAST:]) for run in ranks[0]],
                }
            )
    return made


def table(result: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings and cells, a line for each way; ratios by round with their quartiles in brackets."""
    lines = []
    for row in result["rows"]:
        time, gain = row["step_ms"], row["gain"]
        losses = sorted(row["loss"])
        spread = f"{losses[0]:.3f}" if len(losses) == 1 else f"{mean(losses):.3f} ({losses[0]:.3f}-{losses[-1]:.3f})"
        shown = [f"{time['median']:.0f}", f"{gain['median']:.2f} ({gain['low']:.2f}-{gain['high']:.2f})"]
        lines.append([row["what"], row["network"], row["way"], *shown, spread])
    return HEADINGS, lines


def _mean_of_ranks(values: Iterable[Sequence[float]]) -> list[float]:
    return [mean(each) for each in zip(*values, strict=True)]
