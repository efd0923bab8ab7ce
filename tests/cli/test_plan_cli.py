"""`syncline plan` and `syncline simulate`: from a recorded run that is kept here, and once from end to end."""

import json
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import call

from syncline.cli.main import main
from syncline.plan import load

RECORDED = Path(__file__).parent / "fixtures" / "recorded"
"""What `syncline train --model 'mlp(hidden=256)' --nodes 2 --bandwidth 100Mbit --batch 32 --steps 24 --strategy
'syncline(auto)'` left: its results, and the files of its strategy's folder."""


def lay_out(folder):
    """The recorded files as they lie in a run folder."""
    inner = folder / "runs" / "syncline-auto"
    shutil.copytree(RECORDED, inner)
    (inner / "results.json").rename(folder / "results.json")
    return inner


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    """Call the command line in a folder with the recorded run."""
    handler = signal.getsignal(signal.SIGTERM)
    lay_out(tmp_path / "run")
    monkeypatch.chdir(tmp_path)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    yield call
    signal.signal(signal.SIGTERM, handler)


def costs_of(folder):
    return next(folder.glob("runs/*/costs.json"))


def test_plan_from_a_run(invoke, tmp_path):
    done = invoke("plan", "run", "--out", "plan.toml")
    assert done.code == 0, done.err
    words = (
        "launch",
        "alternatives for 2 nodes, links of 100Mbit/s",
        "none",
        "bf16",
        "bound:",
        "why:",
        "replay:",
        "saved",
    )
    for word in words:
        assert word in done.out
    told = json.loads(invoke("plan", "run", "--json").out)
    assert told["plan"]["hash"] == load(tmp_path / "plan.toml").hash
    assert {"none", "bf16", "int8"} <= {row["name"] for row in told["alternatives"]}
    assert 0 < told["bound_ms"] <= told["predicted_ms"]
    assert told["replay"]["error"] == pytest.approx(told["replay"]["predicted_ms"] / told["replay"]["measured_ms"] - 1)


def test_a_plan_for_another_network_and_for_one_codec(invoke, tmp_path):
    def chosen(*args):
        told = json.loads(invoke("plan", costs_of(tmp_path / "run"), "--json", *args).out)
        return told, {unit["codec"] for unit in told["plan"]["units"]}

    fast, plain = chosen("--bandwidth", "1000Gbit")
    assert plain == {"none"}
    slow, packed = chosen("--bandwidth", "10Mbit")
    assert "none" not in packed
    assert fast["predicted_ms"] < slow["predicted_ms"]
    asked, only = chosen("--compress", "int8", "--nodes", "4")
    assert only == {"int8"}
    assert asked["network"]["ranks"] == 4


def test_simulate_states_its_replay_error(invoke):
    done = invoke("simulate", "run", "--nodes", "64", "--bandwidth", "25Gbit", "--compress", "int8")
    assert done.code == 0, done.err
    for word in ("64 nodes, links of 25Gbit/s", "with int8", "infinite network", "perfect overlap", "error"):
        assert word in done.out
    told = json.loads(invoke("simulate", "run", "--nodes", "10000", "--json").out)
    what_if = told["what_if"]
    assert what_if["infinite_network_ms"] <= told["predicted_ms"]
    assert what_if["perfect_overlap_ms"] == told["bound_ms"] <= told["predicted_ms"]
    assert told["network"]["ranks"] == 10000


def test_a_sweep_is_tabulated_and_plotted(invoke, tmp_path):
    done = invoke("simulate", "run", "--sweep")
    assert done.code == 0, done.err
    assert "compression beyond bf16 pays" in done.out
    told = json.loads(invoke("simulate", "run", "--sweep", "--json", "--nodes", "8").out)
    assert [row["nodes"] for row in told["rows"]] == [8] * 9
    assert [entry["nodes"] for entry in told["pays"]] == [8]
    page = (tmp_path / told["plot"]).read_text()
    assert 'data-chart="nodes-8"' in page
    assert "default-src &#39;none&#39;" in page
    assert "://" not in page.replace("http://www.w3.org", "")


def test_costs_without_their_run_give_no_error(invoke, tmp_path):
    shutil.copytree(costs_of(tmp_path / "run").parent, tmp_path / "alone")
    done = invoke("simulate", "alone", "--bandwidth", "1Gbit")
    assert done.code == 0, done.err
    assert "its error is not known" in done.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "nowhere"), "there is no 'nowhere'"),
        (("simulate", "empty"), "run syncline train --strategy 'syncline(auto, tune=full)' first"),
        (("simulate", "run/results.json"), "name a run folder or its costs.json"),
        (("simulate", "twice"), "name one, such as twice/runs/"),
        (("simulate", "run", "--compress", "topk(0.01)"), "was not measured in that run"),
        (("simulate", "run", "--compress", "auto(tpok)"), "did you mean 'topk'"),
        (("simulate", "run", "--bandwidth", "fast"), "is not a bandwidth"),
        (("simulate", "run", "--nodes", "1"), "--nodes must be at least 2"),
        (("simulate", "run", "--sweep", "--compress", "bf16"), "give --compress a codec"),
        (("plan", "run", "--model", "mlp"), "leave --model out"),
        (("plan", "run", "--out", "empty"), "is a folder"),
        (("plan", "--from", "run"), "there is no --from: the run is the argument, syncline plan RUN"),
        (("simulate", "--from", "run"), "the run is the argument, syncline simulate RUN"),
        (("plan", "--compress", "tpok"), "did you mean 'topk'"),
        (("plan", "--nproc", "1"), "at least two ranks"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, invoke, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(lay_out(tmp_path / "twice"), tmp_path / "twice" / "runs" / "other")
    done = invoke(*args)
    assert done.code == 2, (done.out, done.err)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_broken_files_are_named(invoke, tmp_path):
    folder = costs_of(tmp_path / "run").parent
    for name in ("costs.json", "shapes.json", "plan.toml"):
        kept = (folder / name).read_text()
        (folder / name).write_text("{")
        done = invoke("plan", "run")
        assert (done.code, name in done.err) == (2, True), done.err
        (folder / name).write_text(kept)
    (folder / "errors.json").write_text("{}")
    done = invoke("plan", "run")
    assert (done.code, "errors.json" in done.err) == (2, True), done.err


def test_from_end_to_end(tmp_path):
    job = ("--model", "mlp(hidden=64)", "--batch", "16", "--nproc", "2", "--compress", "auto(int8)")
    done = call("plan", *job, "--out", "plan.toml", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["plan"]["hash"] == load(tmp_path / "plan.toml").hash
    assert told["replay"]["steps"] >= 3
    folder = tmp_path / told["from"]
    assert {"plan.toml", "costs.json", "shapes.json", "errors.json"} <= {path.name for path in folder.iterdir()}
    assert [point["limit"] for point in told["frontier"]] == sorted({point["limit"] for point in told["frontier"]})
    assert set(told["frontier"][0]["codecs"]) <= {"none", "bf16"}
    assert not list(folder.glob(".*"))
