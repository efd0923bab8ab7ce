"""Tables and HTML page of `bench codecs`."""

from collections.abc import Sequence
from typing import Any

from syncline.bench.output import rich_table
from syncline.report.bench_pages import Table, codecs_page
from syncline.report.figures import size, text_table

HEADINGS = (
    "codec",
    "size",
    "encode ms",
    "decode ms",
    "encode/copy",
    "decode/copy",
    "step/copy",
    "wire ratio",
    "error 1",
    "error 100",
)


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row, in the order of `HEADINGS`."""
    errors = list(row["error"].values())
    return [
        row["codec"],
        size(row["bytes"]),
        f"{row['encode_ms']['median']:.3f}",
        f"{row['decode_ms']['median']:.3f}",
        f"{row['encode_of_copy']:.1%}",
        f"{row['decode_of_copy']:.1%}",
        f"{row['step_of_copy']:.1%}",
        f"{row['wire_ratio']:.1f}",
        *(f"{e:.3f}" for e in errors),
    ]


def console_table(result: dict[str, Any], *, width: int = 120) -> Any:
    """The table for a terminal; a narrow one has no times in milliseconds. Needs rich."""
    shown = [i for i, heading in enumerate(HEADINGS) if width >= 110 or not heading.endswith(" ms")]
    heads = [HEADINGS[i].replace("code/", "c/").replace("wire ", "").replace("error", "err") for i in shown]
    rows = [[cells(row)[i] for i in shown] for row in result["rows"]]
    return rich_table("codecs, speed relative to a copy of the same tensor", heads, rows)


def page(result: dict[str, Any]) -> str:
    """The HTML page as text."""
    return codecs_page(result, Table(HEADINGS, [cells(row) for row in result["rows"]]))


def operator_table(rows: Sequence[dict[str, Any]]) -> str:
    """Operators: time, speed relative to a copy by fewest bytes and by time, and fused against plain torch."""
    headings = ("operator", "values", "ms", "issue ms", "plain ms", "GB/s", "copy speed", "copy time", "fused/plain")
    lines = [
        [
            r["operator"],
            f"{r['count'] / 1e6:.1f} M",
            f"{r['fused_ms']['median']:.4f}",
            f"{r['fused_ms']['issue']:.4f}",
            f"{r['plain_ms']['median']:.4f}",
            f"{r['least_gb_s']:.0f}",
            f"{r['of_copy']:.1%}",
            f"{r['of_copy_time']:.1%}",
            f"{r['fused_over_plain']:.1f}x",
        ]
        for r in rows
    ]
    return text_table(headings, lines)
