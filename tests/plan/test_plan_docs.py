"""The page about plans says what is true: its example runs and gives the texts below it, its table counts right."""

import re
from pathlib import Path

import pytest
from model_shapes import resnet50, vgg19

from syncline.plan import default_plan

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, table, file = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert capsys.readouterr().out == table
    assert (tmp_path / "plan.toml").read_text().split("\n\n", 1)[1] == file


def test_the_counts() -> None:
    specs = ("none", "bf16", "topk(0.01)", "powersgd(rank=64)")
    for name, shapes in (("VGG19", vgg19()), ("ResNet50", resnet50())):
        made = [default_plan(shapes, compress=spec) for spec in specs]
        counts = [len(shapes), len(made[0].units), *(len(plan.order) for plan in made)]
        assert f"| {name} | {' | '.join(map(str, counts))} |" in PAGE
