"""Tables and HTML page of `bench pipeline`."""

from typing import Any

from syncline.bench.output import markdown_table
from syncline.report.bench_pages import Table, pipeline_page
from syncline.report.figures import (
    NONE,
    Columns,
    accuracy,
    plural,
    seconds,
    significant,
    size,
    tabulate,
    text_table,
    times,
)

CHUNKS: Columns = (
    ("way", lambda row: row["name"]),
    ("chunks", lambda row: str(row["chunks"] or NONE)),
    ("batch", lambda row: str(row["batch"])),
    ("memory per rank", lambda row: size(row["peak_memory_bytes"])),
    ("samples/s", lambda row: significant(row["samples_per_s"])),
)

CHANGES: Columns = (
    ("way", lambda row: row["way"]),
    ("after epoch", lambda row: str(row["epoch"])),
    ("frozen blocks", lambda row: str(row["frozen"])),
    ("stages x replicas", lambda row: f"{row['from']} -> {row['to']}"),
    ("cost", lambda row: seconds(row["cost_s"])),
    ("paid back after", lambda row: seconds(row["payback_s"])),
)


def ablation_columns(reference: str) -> Columns:
    """The columns of the main table; all ways are compared with the reference."""
    against = f"against {reference}"
    return (
        ("way", lambda row: row["name"]),
        ("time", lambda row: seconds(row["seconds"])),
        (against, lambda row: times(row["speedup"])),
        (f"to 0.5 points below {reference}", lambda row: seconds(row["seconds_to_accuracy"])),
        (against, lambda row: times(row["speedup_to_accuracy"])),
        ("to the accuracy of both", lambda row: seconds(row["seconds_to_common"])),
        (against, lambda row: times(row["speedup_to_common"])),
        ("accuracy", lambda row: accuracy(row["accuracy"])),
        ("points", lambda row: NONE if row["points"] is None else f"{row['points']:+.2f}"),
        ("samples/s", lambda row: significant(row["samples_per_s"])),
        ("memory", lambda row: size(row["peak_memory_bytes"])),
        ("reshapes", lambda row: " ".join(change["to"] for change in row["reshapes"]) or NONE),
    )


def text(result: dict[str, Any]) -> str:
    """The tables for a terminal without rich."""
    parts = [text_table(*_ablation(result)), *(text_table(*cells) for _, cells in _more(result))]
    return "\n\n".join([*parts, sentence(result), *result["warnings"]])


def markdown(result: dict[str, Any]) -> str:
    """The tables and the sentence as a page of the documentation shows them."""
    tables = [markdown_table(*_ablation(result))]
    for title, cells in _more(result):
        tables += [f"{title}:", markdown_table(*cells)]
    count = len(result["seeds"])
    note = f"Means of {plural(count, 'seed')}; shapes and changes of seed {result['seeds'][0]}. {sentence(result)}"
    return "\n\n".join([*tables, note])


def console_table(result: dict[str, Any]) -> Any:
    """The tables for a terminal; needs rich."""
    from rich.console import Group

    from syncline.report.tables import simple_table

    setting = result["setting"]
    shown = [simple_table(f"fine-tuning {setting['model']}", *_ablation(result), fold=True)]
    shown += [simple_table(title, *cells) for title, cells in _more(result)]
    return Group(*shown)


def page(result: dict[str, Any]) -> str:
    """The HTML page as text; ways that lose more than half a point are marked."""
    bad = frozenset(n for n, row in enumerate(result["rows"]) if row["points"] is not None and row["points"] < -0.5)
    more = [(title, Table(*cells)) for title, cells in _more(result)]
    return pipeline_page(result, Table(*_ablation(result), bad), more, sentences=[sentence(result)])


def sentence(result: dict[str, Any]) -> str:
    """The result in one sentence: the fastest way to the reference's accuracy, or if no way has it, the fastest."""
    name = result["reference"]
    if not result["rows"]:
        return "All ways crashed."
    others = [row for row in result["rows"] if row["name"] not in (name, "ddp", "ddp-bf16")]
    if not others:
        return f"{name} took {seconds(result['rows'][0]['seconds'])}."
    reached = [row for row in others if row["speedup_to_accuracy"]]
    if not reached:
        best = min(others, key=lambda row: row["seconds"])
        return f"{best['name']} trains the same epochs {times(best['speedup'])} as fast as {name}."
    best = min(reached, key=lambda row: row["seconds_to_accuracy"])
    early, common, whole = (times(best[key]) for key in ("speedup_to_accuracy", "speedup_to_common", "speedup"))
    return (
        f"{best['name']} reaches the accuracy of {name} minus half a point {early} as fast as {name}, the accuracy of"
        f" both {common} as fast, and ends {whole} as fast with {best['points']:+.2f} points of accuracy."
    )


def _ablation(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    return tabulate(ablation_columns(result["reference"]), result["rows"])


def _more(result: dict[str, Any]) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    """Titles and cells of the further tables: changes of shape, and DDP against Pipe+DDP."""
    changes = [{"way": row["name"], **change} for row in result["rows"] for change in row["reshapes"]]
    tables = [("Changes of shape", tabulate(CHANGES, changes))] if changes else []
    if result["chunks"]:
        tables.append(("DDP against Pipe+DDP", tabulate(CHUNKS, result["chunks"])))
    return tables
