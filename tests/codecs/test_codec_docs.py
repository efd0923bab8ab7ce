"""The docs say what is true: their code runs, their table counts right, algorithms stay short."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from logic_lines import logic_lines

from syncline import codecs, exchange

DOCS = Path(__file__).parents[2] / "docs"
COMPLL = {"onebit": 21, "tbq": 13, "terngrad": 23, "dgc": 29, "graddrop": 29}


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def test_the_compressor_of_the_docs_runs_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(codecs.CODECS, "_items", dict(codecs.CODECS._items))
    code = blocks("write-a-compressor.md")
    assert len([line for line in code[0].splitlines() if line.strip()]) <= 20
    (tmp_path / "my_codec.py").write_text(code[0])
    monkeypatch.syspath_prepend(tmp_path)
    scope: dict[str, object] = {}
    for block in code[1:]:
        exec(block, scope)
    monkeypatch.delitem(sys.modules, "my_codec")
    assert "blocksign" in codecs.available()
    assert codecs.build("blocksign").wire_bytes((1000,)) == 125 + 16
    grads = [[torch.randn(1000)] for _ in range(3)]
    assert "ring" in exchange.legal("blocksign | bf16")
    assert "allreduce" not in exchange.legal("blocksign")
    for name in exchange.legal("blocksign"):
        result = exchange.lockstep("blocksign(block=100)", grads, 2, exchange=name)
        assert all(torch.equal(o[0], result.outputs[0][0]) for o in result.outputs)


@pytest.mark.parametrize("name", codecs.available())
def test_logic_is_short_and_the_table_says_so(name: str) -> None:
    module = importlib.import_module(f"syncline.codecs.algorithms.{name}")
    lines = logic_lines(module)
    assert lines <= 30
    row = re.search(rf"^\| {name} \|.*\| (\d+) \| (\d*) ?\|$", (DOCS / "codecs.md").read_text(), re.MULTILINE)
    assert row is not None
    assert int(row[1]) == lines
    assert row[2] == str(COMPLL.get(name, ""))
    if name in COMPLL:
        assert lines <= COMPLL[name]


def test_every_algorithm_is_in_the_table_of_exactly_these() -> None:
    names = re.findall(r"^\| (\w+) \|.*\| \d+ \| \d* ?\|$", (DOCS / "codecs.md").read_text(), re.MULTILINE)
    assert sorted(names) == codecs.available()


def test_the_wire_column_is_true() -> None:
    n = 256 * 512
    expected = {
        "none": 4 * n, "fp16": 2 * n, "bf16": 2 * n, "int8": n + n // 64, "int4": n // 2 + n // 16,
        "onebit": n // 8 + 8, "efsignsgd": n // 8 + 4, "tbq": n // 4 + 4, "terngrad": n // 4 + 4,
        "qsgd": n // 2 + n // 128, "natural": n,
        "topk": 8 * 0.01 * n, "randomk": 4 * 0.25 * n, "threshold": 8 * 0.05 * n, "graddrop": 10 * 0.01 * n,
        "dgc": 10 * 0.01 * n, "powersgd": 4 * 4 * (256 + 512), "acpsgd": 2 * 4 * (256 + 512),
    }  # fmt: skip
    for name, size in expected.items():
        assert codecs.build(name).wire_bytes((256, 512)) == pytest.approx(size, abs=8), name


def test_the_chain_table_is_true() -> None:
    for row in re.findall(
        r"^\| (?:the gradient|values|factors|scales|no floats) \| (.*) \| (.*) \|$",
        (DOCS / "codecs.md").read_text(),
        re.MULTILINE,
    ):
        heads, tails = (cell.split(", ") for cell in row)
        for head in heads:
            for tail in ("fp16", "bf16", "int8", "int4"):
                if tail in tails and head != tail:
                    codecs.build(f"{head} | {tail}")
                else:
                    with pytest.raises(ValueError, match="you can chain"):
                        codecs.build(f"{head} | {tail}")
