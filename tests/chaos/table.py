"""The table of the last chaos run: `benchmarks/results/chaos.json` as the table of docs/faults.md."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "chaos.json"
PAGE = ROOT / "docs" / "faults.md"
_BEGIN, _END = "<!-- chaos: begin -->\n", "<!-- chaos: end -->\n"


def table(result: dict[str, Any]) -> str:
    """A line about the run, then a row for each fault."""
    soak = sum(row["seconds"] for row in result["faults"] if row["fault"] == "soak" and row.get("seconds"))
    about = (
        f"{len(result['faults'])} rows with seed {result['seed']}, a soak of {soak:.0f} s among them, "
        f"{result['created'][:10]}, {result['cores']} cores."
    )
    rows = [f"| {row['fault']} | {row['what']} | {row['outcome']} | {_seconds(row)} |" for row in result["faults"]]
    return "\n".join([about, "", "| fault | where | outcome | s |", "|---|---|---|---|", *rows, ""])


def page_with(result: dict[str, Any]) -> str:
    """The text of docs/faults.md with this table."""
    head, _, rest = PAGE.read_text().partition(_BEGIN)
    return f"{head}{_BEGIN}{table(result)}{_END}{rest.partition(_END)[2]}"


def last_result() -> dict[str, Any]:
    """The committed result."""
    content: dict[str, Any] = json.loads(RESULT.read_text())
    return content


def _seconds(row: dict[str, Any]) -> str:
    return "-" if row.get("seconds") is None else f"{row['seconds']:.1f}"
