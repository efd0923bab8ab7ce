"""Table of predicted and measured step times: python scripts/predictions.py [FILE ...]

One line for every engine row of every `overlap.json` in benchmarks/results; the table is in docs/planner.md.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def rows(files: list[Path]) -> Iterator[list[str]]:
    """One line per plan that was run."""
    for file in files:
        result = json.loads(file.read_text())
        setting = result["setting"]
        where = f"{setting['nodes']} nodes of {setting['bandwidth'] or 'no limit'}, {setting['device']}"
        if setting["ranks"] != setting["nodes"]:
            where = f"{setting['ranks']} ranks on {where}"
        for row in result["rows"]:
            if row["predicted_ms"] and row["step_ms"]:
                error = f"{row['prediction_error']:+.0%}"
                times = (f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in (row["predicted_ms"], row["step_ms"]))
                yield [f"{setting['model']}, batch {setting['batch']}", where, f"`{row['strategy']}`", *times, error]


def table(files: list[Path]) -> str:
    """The table in Markdown."""
    heads = ["model", "network", "strategy", "predicted ms", "measured ms", "error"]
    lines = [heads, ["---"] * len(heads), *rows(files)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("overlap-*.json"))))
