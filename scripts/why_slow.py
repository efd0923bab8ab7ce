"""Records the cases of docs/why-slow.md, and writes their figures and pictures there: `make why-slow`.

A plain DDP loop (examples/ddp_loop.py) runs with a cause of slowness and without it. The page compares the time that
the analysis calls recoverable and the gain that the replay predicts with the measured gain. The case `python` needs a
GPU: where there is none, record it elsewhere and give its traces with `--traces FOLDER` (FOLDER/python/slow and quick).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
DOCS, IMAGES = ROOT / "docs", ROOT / "docs" / "images"
LOOP = ["examples/ddp_loop.py", "--steps", "40"]
LOCAL = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
ALONE = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), "")


@dataclass(frozen=True)
class Case:
    """A slow run, the same run without the cause, and the what-if question that predicts the second."""

    name: str
    slow: tuple[str, ...]
    quick: tuple[str, ...]
    what: str | None
    shown: str
    """The command as the page shows it."""


CASES = (
    Case(
        "network",
        ("-m", "syncline", "cluster", "--nodes", "2", "--bandwidth", "100Mbit", "--", sys.executable, *LOOP),
        ("-m", "syncline", "cluster", "--nodes", "2", "--", sys.executable, *LOOP),
        "infinite-network",
        "syncline cluster --nodes 2 --bandwidth 100Mbit -- python examples/ddp_loop.py",
    ),
    Case(
        "rank",
        (*LOCAL, *LOOP, "--slow", "rank"),
        (*LOCAL, *LOOP),
        "no-straggler",
        "torchrun --nproc-per-node 2 examples/ddp_loop.py --slow rank",
    ),
    Case(
        "reading",
        (*LOCAL, *LOOP, "--slow", "reading"),
        (*LOCAL, *LOOP),
        None,
        "torchrun --nproc-per-node 2 examples/ddp_loop.py --slow reading",
    ),
    Case(
        "python",
        (*ALONE, *LOOP, "--device", "cuda", "--slow", "python"),
        (*ALONE, *LOOP, "--device", "cuda"),
        None,
        "torchrun examples/ddp_loop.py --device cuda --slow python",
    ),
)


def python(*arguments: str) -> str:
    """Run a Python command and return its standard output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(  # noqa: S603 - our own commands
        [sys.executable, *arguments], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def record(case: Case, folder: Path, recorded: Path | None) -> dict[str, Any]:
    """Run both, unless they were recorded elsewhere; return the verdict on the first and the measured gain."""
    traces = {}
    for way, command in (("slow", case.slow), ("quick", case.quick)):
        traces[way] = (recorded or folder) / case.name / way
        if recorded is None:
            python(*command, "--trace", str(traces[way]))
    analyses = {way: json.loads(python("-m", "syncline", "trace", "analyze", str(path), "--json"))
            for way, path in traces.items()}  # fmt: skip
    slow, quick = (analyses[way]["step_ms"]["median"] for way in ("slow", "quick"))
    row = {
        "verdict": analyses["slow"]["verdict"],
        "step_ms": {"with": slow, "without": quick},
        "gained_ms": slow - quick,
        "ranks": [{"rank": r["rank"], "breakdown_ms": r["breakdown_ms"]} for r in analyses["slow"]["ranks"]],
        "overlap": analyses["slow"]["overlap"],
        "queue_ms": {way: one.get("queue_ms") for way, one in analyses.items()},
    }
    if case.what:
        asked = ("-m", "syncline", "simulate", str(traces["slow"]), "--what", case.what, "--json")
        row["replay"] = json.loads(python(*asked))
    python("-m", "syncline", "trace", "view", str(traces["slow"]), "-o", str(folder / f"{case.name}.html"))
    row["text"] = python("-m", "syncline", "trace", "analyze", str(traces["slow"]))
    return row


def picture(page: Page, source: Path, target: Path) -> None:
    """Save a picture of one step of the timeline, with the verdict above it."""
    page.goto(source.as_uri())
    page.wait_for_timeout(800)
    page.evaluate("document.querySelectorAll('header, footer').forEach((part) => part.remove())")
    figure = page.locator("figure.timeline").bounding_box()
    top = page.locator(".diagnosis").bounding_box()
    assert figure is not None
    assert top is not None
    lanes = page.locator("figure.timeline canvas").bounding_box()
    assert lanes is not None
    height = lanes["y"] + lanes["height"] - top["y"] + 24
    page.screenshot(
        path=target, full_page=True, clip={"x": top["x"], "y": top["y"], "width": top["width"], "height": height}
    )


def block(case: Case, row: dict[str, Any]) -> str:
    """The text of a case in the page."""
    text = re.split(r"\n(?:units by|kernels by)", row["text"])[0].rstrip()
    text = "\n".join(line.rstrip() for line in text.splitlines()[1:])
    verdict, step = row["verdict"], row["step_ms"]
    lines = ["```console", f"$ {case.shown}", "$ syncline trace analyze syncline-trace", text, "```", ""]
    lines += [f"![One step of the timeline](images/why-slow-{case.name}.png)", ""]
    said = f"{verdict['recoverable_ms']:.0f} ms per step were said to be recoverable."
    if "replay" in row:
        (answer,) = (one for one in row["replay"]["answers"] if one["what"] == case.what)
        said += (
            f" The replay (`syncline simulate --what {case.what}`) predicted a step of {answer['predicted_ms']:.0f} ms."
        )
    lines += [f"{said} Without the cause a step takes {step['without']:.0f} ms instead of {step['with']:.0f} ms:"
              f" {row['gained_ms']:.0f} ms were gained."]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Record all cases, or the named ones, and put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["network", "rank", "reading"])
    parser.add_argument("--folder", type=Path, default=Path("runs/why-slow"))
    parser.add_argument("--traces", type=Path, help="a folder of traces that were recorded elsewhere")
    given = parser.parse_args()
    folder = (ROOT / given.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    page_file, figures = DOCS / "why-slow.md", ROOT / "benchmarks" / "results" / "why-slow.json"
    rows = json.loads(figures.read_text()) if figures.exists() else {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 980, "height": 1600})
        for case in CASES:
            if case.name not in given.cases:
                continue
            rows[case.name] = row = record(case, folder, given.traces)
            picture(page, folder / f"{case.name}.html", IMAGES / f"why-slow-{case.name}.png")
            print(f"{case.name}: {row['verdict']['kind']}, {row['verdict']['recoverable_ms']:.1f} ms recoverable,"
                  f" {row['gained_ms']:.1f} ms gained")  # fmt: skip
        browser.close()
    figures.write_text(json.dumps(rows, indent=1) + "\n")
    text = page_file.read_text()
    for case in (one for one in CASES if one.name in rows):
        marks = rf"(<!-- {case.name} -->\n).*?(<!-- /{case.name} -->)"
        text = re.sub(marks, lambda m, c=case: f"{m[1]}{block(c, rows[c.name])}\n{m[2]}", text, flags=re.DOTALL)
    page_file.write_text(text)


if __name__ == "__main__":
    main()
