"""Makes pictures of the docs: those of the four projects that Syncline carries on, and steps over the bandwidth.

Each one is a part of the page of a command, or of a result that was kept: `python scripts/seed_pictures.py [NAME ...]`.
Needs Chromium.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

from syncline.bench.overhead.gpu_claims import page as networks_page
from syncline.bench.overlap.table import page as overlap_page
from syncline.bench.pipeline.table import page as pipeline_page

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
ALONE = """heading => document.querySelectorAll("main > section").forEach(section => {
    if (section.querySelector("h2").textContent !== heading) section.remove();
})"""
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Picture:
    """A command of `syncline` that writes a report, and the heading of the part to show."""

    command: tuple[str, ...]
    heading: str


PICTURES = {
    "scaling": Picture(("compare", "--recipe", "horovod-scaling"), "Scaling"),
    "curves": Picture(
        ("compare", "--recipe", "course-vgg11", "--model", "vgg11(width=0.25)"),
        "Loss",
    ),
}  # fmt: skip
KEPT = {
    "streams": ("overlap-vgg19-2nodes-1gbit-h200-batch64.json", overlap_page, "One step of each"),
    "networks": ("overhead-h200.json", networks_page, "ResNet-50 on links of any speed"),
    "freezes": ("pipeline-vit-h200.json", pipeline_page, "Frozen blocks, stages and replicas"),
}
"""Measurements that were kept: file, what makes its page, and the heading of the part to show."""


def _ran(name: str, folder: Path) -> tuple[Path, str]:
    """The page of a picture, made by its command if it does not exist yet, and the heading of the part."""
    picture = PICTURES[name]
    if not (folder / name / "report.html").exists():
        command = [sys.executable, "-m", "syncline", *picture.command, "--out", str(folder / name)]
        subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - our own commands
    return folder / name / "report.html", picture.heading


def _kept(name: str, folder: Path) -> tuple[Path, str]:
    """The page of a measurement that was kept, and the heading of the part."""
    file, make, heading = KEPT[name]
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{name}.html"
    page.write_text(make(json.loads((RESULTS / file).read_text())))
    return page, heading


def main() -> None:
    """Run the commands whose page does not exist yet, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*KEPT, *PICTURES])
    parser.add_argument("--folder", type=Path, default=Path("runs/pictures"))
    given = parser.parse_args()
    folder = (ROOT / given.folder).resolve()
    pages = {name: (_kept(name, folder) if name in KEPT else _ran(name, folder)) for name in given.names}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 980, "height": 1600})
        for name, (file, heading) in pages.items():
            page.goto(file.as_uri())
            page.evaluate(ALONE, heading)
            page.wait_for_timeout(2000)
            page.locator("main > section:visible").screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
