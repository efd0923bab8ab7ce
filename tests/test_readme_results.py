"""The README's table of results agrees with the committed JSON files, and its rival is the best of its family."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def _rows() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- results.*?-->\n(.*?)<!-- /results -->", text, re.DOTALL)
    assert block
    lines = block[1].strip().splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row[3]} {row[6]}")
def test_every_row_is_in_its_file(row: list[str]) -> None:
    _, torch, torch_ms, ours, ours_ms, gain, file = row
    by_name = {entry["strategy"]: entry for entry in json.loads((RESULTS / file).read_text())["rows"]}
    rival, mine = by_name[torch], by_name[ours]
    assert (f"{rival['step_ms']:.0f}", f"{mine['step_ms']:.0f}") == (torch_ms, ours_ms)
    assert rival["best_of_family"], "the rival is shown at its best"
    ratio = mine["times_faster_than"][rival["family"]]
    assert gain == f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"


def test_the_table_shows_where_torch_is_as_fast() -> None:
    resnet, gpt2, *_ = json.loads((RESULTS / "overhead-h200.json").read_text())["cells"]
    dense = [next(row for row in cell["rows"] if row["way"] == "syncline") for cell in (resnet, gpt2)]
    first, second = (f"{row['ratio_to_ddp']['step']['median']:.2f}" for row in dense)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{first} times as long" in text
    assert f"GPT-2: {second}" in text
    assert len(_rows()) <= 8, "a short table"
