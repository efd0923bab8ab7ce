"""`syncline bench`, on a codec of the user's own beside ours."""

import json

import pytest
from forked import call

from syncline.errors import UsageError
from syncline.train.strategies import load

OWN = """
import torch
from syncline.codecs import Merge, codec, coder

def encode(x): return (x.half(),)
def decode(payload, count): return payload[0].float()

@codec("myhalf", feedback=True)
def myhalf(grad, state):
    return (yield Merge(grad, coder(encode, decode)))
"""


def test_codecs_of_ours_and_of_the_users(tmp_path):
    (tmp_path / "my_codec.py").write_text(OWN)
    done = call(
        "bench", "codecs", "--codecs", "my_codec:myhalf,int8", "--largest-mb", "0.1", "--out", "b", cwd=tmp_path
    )
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "b" / "codecs.json").read_text())["rows"]
    assert [row["codec"] for row in rows] == ["my_codec:myhalf", "int8"]
    assert rows[0]["wire_ratio"] == 2
    assert rows[1]["error"]["100"] < rows[1]["error"]["1"] < 0.05
    assert all(row["encode_of_copy"] > 0 for row in rows)
    page = (tmp_path / "b" / "codecs.html").read_text()
    assert 'data-chart="encode"' in page
    assert "my_codec:myhalf" in page


def test_quality_has_a_dense_row_and_curves(tmp_path):
    job = ("--codecs", "int8", "--steps", "3", "--model", "mlp(hidden=16)", "--data", "shapes", "--seeds", "0")
    done = call("bench", "quality", *job, "--json", "--out", "b", cwd=tmp_path)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    dense, lossy = result["rows"]
    assert dense["codec"] == "none"
    assert lossy["loss"]["train"] == pytest.approx(dense["loss"]["train"], abs=0.05)
    assert [row["verdict"] for row in result["summary"]] == ["dense", "one seed"]
    assert result["summary"][1]["wire_ratio"] > 3
    assert 'data-chart="loss-0-1"' in (tmp_path / "b" / "quality.html").read_text()


def test_an_own_strategy_must_be_one():
    with pytest.raises(UsageError, match="is a part of Python: name a class or function of your own"):
        load("collections:Counter")
