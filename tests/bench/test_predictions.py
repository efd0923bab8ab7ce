"""The table of predictions in the docs is that of the committed results."""

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_the_docs_have_the_table_of_the_committed_runs() -> None:
    made: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "predictions.py"))
    files = sorted((ROOT / "benchmarks" / "results").glob("overlap-*.json"))
    page = (ROOT / "docs" / "planner.md").read_text()
    table = page.partition("<!-- predictions -->")[2].partition("<!-- /predictions -->")[0]
    assert table.strip() == made["table"](files)
