"""Compares two checkouts of Syncline: the same benchmark from each in turn, and a table of their rows.

    python scripts/before_after.py ../base . --rounds 3 --out benchmarks/results/before-after-overhead-cpu.json -- \
        bench overhead --steps 10

Everything after `--` is the `syncline` command, without `--json`. Every other round the order is reversed, so that a
drift of the machine favours neither. A row's value is the median of `step_ms` over the rounds, with the range of all
turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def step_ms(row: dict) -> tuple[float, float, float] | None:
    """Median, lowest and highest step time of a row of `bench overlap` or `bench overhead`; None if it crashed."""
    value = row["step_ms"]
    if isinstance(value, dict):
        return value["median"], value["low"], value["high"]
    return None if value is None else (value, row["step_ms_low"], row["step_ms_high"])


def run_once(checkout: Path, command: list[str]) -> dict[str, tuple[float, float, float]]:
    """Step times by strategy, from one run of the command with this checkout's code."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "syncline", *command, "--json", "--out", f"{folder}/bench"]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
        done = subprocess.run(  # noqa: S603 - the user's own command
            program, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{checkout}: the command ended with {done.returncode}; its messages are above")
    rows = json.loads(done.stdout)["rows"]
    found = {row.get("strategy") or row["way"]: step_ms(row) for row in rows}
    return {name: value for name, value in found.items() if value is not None}


def commit(checkout: Path) -> str:
    """The checkout's commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def main() -> None:
    """Run both checkouts in turn; print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    sides = {"before": asked.before, "after": asked.after}
    seen: dict[str, list[dict[str, tuple[float, float, float]]]] = {name: [] for name in sides}
    for number in range(asked.rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seen[name].append(run_once(sides[name], asked.command))
            print(f"round {number + 1} of {asked.rounds}: {name} done", file=sys.stderr, flush=True)
    rows = []
    for strategy in seen["before"][0]:
        row: dict = {"strategy": strategy}
        for name, rounds in seen.items():
            values = [found[strategy] for found in rounds if strategy in found]
            medians, lows, highs = zip(*values, strict=True)
            row[name] = {"step_ms": statistics.median(medians), "low": min(lows), "high": max(highs)}
        ratios = [a[strategy][0] / b[strategy][0] for b, a in zip(seen["before"], seen["after"], strict=True)]
        row["ratio"] = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        rows.append(row)
    result = {
        "command": " ".join(["syncline", *asked.command]),
        "rounds": asked.rounds,
        "commits": {name: commit(path) for name, path in sides.items()},
        "rows": rows,
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'strategy':32} {'before, ms':>22} {'after, ms':>22} {'after / before':>22}")
    for row in rows:
        before, after = (_cell(row[name], "step_ms", ".0f") for name in sides)
        print(f"{row['strategy']:32} {before:>22} {after:>22} {_cell(row['ratio'], 'median', '.3f'):>22}")


def _cell(value: dict[str, float], key: str, style: str) -> str:
    return f"{value[key]:{style}} [{value['low']:{style}}-{value['high']:{style}}]"


if __name__ == "__main__":
    main()
