"""Tables and HTML page of `bench codecs`."""

from collections.abc import Sequence
from typing import Any

from syncline.report.bench_pages import Table, codecs_page
from syncline.report.figures import NONE, Columns, size, tabulate, text_table

COLUMNS: Columns = (
    ("codec", lambda row: row["codec"]),
    ("size", lambda row: size(row["bytes"])),
    ("encode ms", lambda row: f"{row['encode_ms']['median']:.3f}"),
    ("decode ms", lambda row: f"{row['decode_ms']['median']:.3f}"),
    ("encode/copy", lambda row: f"{row['encode_of_copy']:.1%}"),
    ("decode/copy", lambda row: f"{row['decode_of_copy']:.1%}"),
    ("step ms", lambda row: f"{row['step_ms']['median']:.3f}"),
    # Results of earlier versions have no time to issue, and count bytes of a copy only.
    ("issue ms", lambda row: f"{row['issue_ms']['median']:.3f}" if "issue_ms" in row else NONE),
    ("step/copy", lambda row: f"{row['step_of_copy']:.1%}"),
    ("copy speed", lambda row: f"{row['step_of_copy_speed']:.1%}" if "step_of_copy_speed" in row else NONE),
    ("wire ratio", lambda row: f"{row['wire_ratio']:.1f}"),
    ("error 1", lambda row: f"{row['error']['1']:.3f}"),
    ("error 100", lambda row: f"{row['error']['100']:.3f}"),
)
OPERATOR_COLUMNS: Columns = (
    ("operator", lambda row: row["operator"]),
    ("values", lambda row: f"{row['count'] / 1e6:.1f} M"),
    ("ms", lambda row: f"{row['fused_ms']['median']:.4f}"),
    ("issue ms", lambda row: f"{row['fused_ms']['issue']:.4f}"),
    ("plain ms", lambda row: f"{row['plain_ms']['median']:.4f}"),
    ("GB/s", lambda row: f"{row['least_gb_s']:.0f}"),
    ("copy speed", lambda row: f"{row['of_copy']:.1%}"),
    ("copy time", lambda row: f"{row['of_copy_time']:.1%}"),
    ("fused/plain", lambda row: f"{row['fused_over_plain']:.1f}x"),
)
"""Time, speed relative to a copy by fewest bytes and by time, and fused against plain torch."""


def console_table(result: dict[str, Any], *, width: int = 120) -> Any:
    """The table for a terminal; a narrow one has no times in milliseconds. Needs rich."""
    from syncline.report.tables import simple_table

    shown = [column for column in COLUMNS if width >= 110 or not column[0].endswith(" ms")]
    heads, rows = tabulate(shown, result["rows"])
    heads = [head.replace("/", "/\n").replace(" ", "\n") for head in heads]
    return simple_table("codecs, speed relative to a copy of the same tensor", heads, rows)


def page(result: dict[str, Any]) -> str:
    """The HTML page as text."""
    return codecs_page(result, Table(*tabulate(COLUMNS, result["rows"])))


def operator_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the operators as text."""
    return text_table(*tabulate(OPERATOR_COLUMNS, rows))
