"""The page about the simulator says what is true: its example runs, and its table is what comes out."""

import doctest
import re
import sys
from pathlib import Path

import pytest
from sim_cases import vgg19

from syncline.sim import simulate

PAGE = (Path(__file__).parents[2] / "docs" / "sim.md").read_text()
FIFO = list(range(19))
ORDERS = {
    "first in, first out": FIFO,
    "fc1 last": [0, 1, *FIFO[3:], 2],
    "all fc last": [*FIFO[3:], 0, 1, 2],
}


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert capsys.readouterr().out == text


def test_the_headline() -> None:
    rows = re.findall(r"^\| (128|32) \| (.*?) \| \d+ \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for batch, order, said in rows:
        told = simulate(vgg19(0.204 if batch == "128" else 0.0295).ordered(ORDERS[order]))
        assert round(told.step * 1e3) == int(said)


def test_the_docstring() -> None:
    done = doctest.testmod(sys.modules["syncline.sim.steady.simulate"])
    assert done.attempted
    assert not done.failed
