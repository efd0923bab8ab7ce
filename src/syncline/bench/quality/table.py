"""Tables and HTML page of `bench quality`."""

from typing import Any

from syncline.bench.output import markdown_table
from syncline.bench.quality.rows import AUTO_LIMITS, LIMIT
from syncline.report.bench_pages import Table, quality_page
from syncline.report.figures import NONE, Columns, accuracy, significant, tabulate, times

BAD = ("worse", "diverged")
COLUMNS: Columns = (
    ("task", lambda row: row["task"] + (f" at {row['network']}" if row["network"] else "")),
    ("codec", lambda row: row["codec"]),
    ("seeds", lambda row: str(len(row["seeds"]))),
    ("accuracy", lambda row: accuracy(row["accuracy"])),
    ("points below dense", lambda row: _difference(row["points"], row["points_interval"])),
    ("loss", lambda row: significant(row["loss"], digits=4)),
    ("% above dense", lambda row: _difference(row["loss_percent"], row["loss_percent_interval"])),
    ("wire ratio", lambda row: NONE if row["wire_ratio"] is None else f"{row['wire_ratio']:.1f}"),
    ("error, largest", lambda row: _error(row["errors"])),
    ("speed", lambda row: times(row["speedup"])),
    ("verdict", lambda row: row["verdict"]),
)
NOTE = (
    "Brackets: the 95% interval of the mean over the seeds, from differences between runs of the same seed. The loss is"
    " that of the test samples, or the last training loss where there are none. Verdict: equal (zero is inside the"
    f" interval, and all of it is within the limit), within the noise (the mean is, and not the whole interval), within"
    f" the limit ({LIMIT:g} point, or percent of loss without an accuracy; auto:"
    f" {AUTO_LIMITS['points']:g} and {AUTO_LIMITS['loss_percent']:g}), worse, or unclear (beyond the limit, and zero is"
    " inside). Error: relative squared error of the averaged gradients as auto's guard read it in training, mean and"
    " largest, and the budget. Speed: seconds of dense / seconds, for real ranks."
)


def console_table(result: dict[str, Any]) -> Any:
    """The table for a terminal; needs rich."""
    from syncline.report.tables import simple_table

    return simple_table("quality of training", *tabulate(COLUMNS, result["summary"]), fold=True)


def markdown(result: dict[str, Any]) -> str:
    """The table as a page of the documentation shows it."""
    rows = [row | {"codec": f"`{row['codec']}`"} for row in result["summary"]]
    return markdown_table(*tabulate(COLUMNS, rows))


def page(result: dict[str, Any]) -> str:
    """The HTML page as text. Codecs that lose more than the limit are marked."""
    bad = frozenset(number for number, row in enumerate(result["summary"]) if row["verdict"] in BAD)
    return quality_page(result, Table(*tabulate(COLUMNS, result["summary"]), bad), note=NOTE)


def _error(read: dict[str, float] | None) -> str:
    if read is None:
        return NONE
    mean, largest = (f"{read[name]:.2g}" for name in ("mean", "largest"))
    return f"{mean}, {largest} of {read['budget']:g}"


def _difference(lost: float | None, interval: tuple[float, float] | None) -> str:
    if lost is None:
        return NONE
    return f"{lost:+.1f}" if interval is None else f"{lost:+.1f} ({interval[0]:+.1f} to {interval[1]:+.1f})"
