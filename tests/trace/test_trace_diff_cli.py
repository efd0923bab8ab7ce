"""`syncline trace diff` and `syncline simulate --what`, in this process, on traces made by hand."""

import json
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import diff_traces
import pytest

from syncline.cli.main import main
from syncline.trace import Trace
from syncline.trace.formats.chrome_write import write_chrome_trace

RECORDED = Path(__file__).parents[1] / "cli" / "fixtures" / "recorded"


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    for name, options in (
        ("a", {}),
        ("b", {"exchange": 12.0, "seed": 1}),
        ("short", {"steps": 5}),
        ("two", {"steps": 2}),
    ):
        (tmp_path / name / "runs" / "ddp").mkdir(parents=True)
        about = {"strategy": "ddp", "world_size": 2}
        write_chrome_trace(
            Trace.of(diff_traces.trace(**options), metadata=about, split=False),
            tmp_path / name / "runs" / "ddp" / "trace.json.gz",
        )
    (tmp_path / "empty").mkdir()

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_exit_codes_for_a_gate(invoke):
    slower = invoke("trace", "diff", "a", "b")
    assert slower.code == 1
    for word in ("exposed exchange", "95% interval", "B is slower", "MB per step", "all-reduce a", "(ddp, 2 ranks,"):
        assert word in slower.out
    assert "exposed encode" not in slower.out, "what neither has"
    assert invoke("trace", "diff", "a", "b", "--threshold", "50%").code == 0
    assert invoke("trace", "diff", "b", "a").code == 0
    assert invoke("trace", "diff", "a", "a/runs/ddp/trace.json.gz").code == 0


def test_too_few_steps_show_the_figures_and_exit_with_2(invoke):
    done = invoke("trace", "diff", "a", "short")
    assert done.code == 2
    assert "forward" in done.out
    assert done.err.startswith("syncline: too few steady steps for a verdict: B has 4")
    told = invoke("trace", "diff", "a", "short", "--json")
    assert (told.code, json.loads(told.out)["verdict"]["kind"]) == (2, "unknown")


def test_json_is_all_there_is(invoke):
    done = invoke("trace", "diff", "a", "b", "--json")
    told = json.loads(done.out)
    assert (done.code, done.err, told["verdict"]["kind"]) == (1, "", "slower")
    assert told["a"]["source"] == "a/runs/ddp/trace.json.gz"
    assert told["phases"]["exposed_exchange"]["significant"]


def test_any_trace_answers_what_if(invoke):
    done = invoke("simulate", "a")
    assert done.code == 0, done.err
    for word in (
        "as it was",
        "no-straggler",
        "infinite-network",
        "2x",
        "perfect-overlap",
        "replay: with transfers",
        "error",
    ):
        assert word in done.out
    told = json.loads(invoke("simulate", "a/runs/ddp/trace.json.gz", "--what", "3x,infinite-network", "--json").out)
    assert [row["what"] for row in told["answers"]] == ["3x", "infinite-network"]
    assert all(row["gain_ms"] > 0 for row in told["answers"])
    assert abs(told["replay"]["error"]) < 0.1
    assert told["format"] == "syncline what-if 1"
    assert (told["strategy"], told["world_size"], told["steps"]["last"]) == ("ddp", 2, 29)


def test_another_codec_is_answered_from_cost_curves(invoke, tmp_path):
    inner = tmp_path / "auto" / "runs" / "syncline-auto"
    shutil.copytree(RECORDED, inner)
    (inner / "results.json").rename(tmp_path / "auto" / "results.json")
    write_chrome_trace(Trace.of(diff_traces.trace(), split=False), inner / "trace.json.gz")
    told = json.loads(invoke("simulate", "auto", "--what", "2x,codec=auto(int8, bf16)", "--json").out)
    assert [(row["what"], row["by"]) for row in told["answers"]] == [
        ("2x", "replay"), ("codec=auto(int8, bf16)", "cost curves")
    ]  # fmt: skip
    assert told["answers"][1]["predicted_ms"] > 0
    assert "infinite_network_ms" in json.loads(invoke("simulate", "auto", "--json").out)["what_if"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("trace", "diff", "a", "nowhere"), "there is no 'nowhere'"),
        (("trace", "diff", "a", "empty"), "holds no trace"),
        (("trace", "diff", "a", "b", "--threshold", "much"), "write a share, such as 5%"),
        (("simulate", "a", "--nodes", "4"), "--nodes needs cost curves"),
        (("simulate", "a", "--sweep"), "--sweep needs cost curves"),
        (("simulate", "a", "--what", "2x", "--bandwidth", "1Gbit"), "leave --bandwidth out"),
        (("simulate", "a", "--what", "codec=int8"), "'codec=int8' needs cost curves"),
        (("simulate", "a", "--what", "no-stragler"), "did you mean 'no-straggler'"),
        (("simulate", "a", "--what", ","), "--what is empty"),
        (("simulate", "two"), "steady steps are in every rank's trace"),
        (("simulate", "empty", "--what", "2x"), "holds no trace"),
        (("simulate", "nowhere"), "there is no 'nowhere'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(invoke, args, message):
    done = invoke(*args)
    assert done.code == 2, (done.out, done.err)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
