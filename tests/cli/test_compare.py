"""The real command line from end to end: local ranks, emulated nodes, torchrun, a world-size sweep."""

import gzip
import json
import socket
import sys

import pytest
from command import Command, results, run
from forked import call, launched

from syncline.trace import PHASES

MODEL = ("--model", "mlp(hidden=64)", "--batch", "16", "--steps", "5", "--set", "train.test_samples=16")
KEYS = {
    "strategy", "status", "world_size", "step_ms", "first_step_ms", "loss", "test_accuracy", "samples_per_s",
    "wire_bytes_per_step", "breakdown", "ranks", "train_accuracy", "peak_memory_bytes",
}  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def check_run(entry, *, world_size, steps=5):
    assert entry["status"] == "ok", entry.get("error")
    assert set(entry) >= KEYS
    assert entry["world_size"] == world_size == len(entry["ranks"])
    assert len(entry["loss"]) == steps == len(entry["step_ms_series"])
    assert {"median", "mean", "p95"} <= set(entry["step_ms"])
    assert entry["peak_memory_bytes"] == max(part["peak_memory_bytes"] for part in entry["ranks"])
    for part in (entry, *entry["ranks"]):
        assert part["peak_memory_bytes"] > 0
        assert set(part["breakdown"]) == set(PHASES)
        assert sum(part["breakdown"].values()) == pytest.approx(1, abs=0.01)


def test_every_strategy_on_local_ranks(tmp_path):
    strategies = "single,gather-scatter,all-reduce,server(servers=2),ring,ddp,ddp-bf16,horovod,byteps"
    done = call("compare", "--strategies", strategies, *MODEL, "--nproc", "4", "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    content = results(tmp_path / "run")
    by_name = {entry["strategy"]: entry for entry in content["runs"]}
    for name, entry in by_name.items():
        check_run(entry, world_size=1 if name == "single" else 4)
        assert all(0 <= part["train_accuracy"] <= 1 for part in (entry, *entry["ranks"]))
        folder = tmp_path / "run" / "runs" / name.replace("(", "-").replace(")", "").replace("=", "-")
        rows = [json.loads(line) for line in (folder / "rank0.steps.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(5))
        assert {"data_ms", "forward_ms", "backward_ms", "samples_per_s", "syncs_per_s", "synchronised_bytes"} <= set(
            rows[0]
        )
        trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
        lanes = {event.get("cat") for event in trace["traceEvents"]}
        assert {"data", "forward", "backward", "update", "step"} <= lanes
        assert ("exchange" in lanes) == (name != "single")
    exact = by_name["gather-scatter"]["loss"]
    assert by_name["all-reduce"]["loss"] == exact, "bit for bit"
    for name in ("server(servers=2)", "ring", "ddp"):
        assert by_name[name]["loss"] == pytest.approx(exact, abs=1e-5)
    assert by_name["single"]["loss"] == pytest.approx(exact, abs=1e-5), "no BatchNorm: the same mathematics"
    assert by_name["ddp-bf16"]["loss"] == pytest.approx(exact, abs=5e-2)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["batch"] == 16
    again = call("report", "run", "--json", cwd=tmp_path)
    assert json.loads(again.out) == content


@pytest.mark.namespaces
def test_shaped_nodes_bytes_match_theory_and_the_root_is_the_bottleneck(tmp_path):
    model = ("--model", "mlp(hidden=256)", "--batch", "16", "--steps", "4", "--set", "train.test_samples=0")
    strategies = "gather-scatter,all-reduce,server,ddp"
    links = ("--nodes", "4", "--bandwidth", "400Mbit", "--json")
    done = run("compare", "--strategies", strategies, *model, *links, "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    content = json.loads(done.out)
    assert content["network"] == {"emulated": True, "nodes": 4, "bandwidth": 400_000_000, "note": None}
    runs = {entry["strategy"]: entry for entry in content["runs"]}
    size = runs["ddp"]["synchronised_bytes"]
    for name, factor in {"gather-scatter": 6, "all-reduce": 1.5, "server": 4, "ddp": 1.5}.items():
        entry = runs[name]
        check_run(entry, world_size=4, steps=4)
        assert entry["wire"]["measured"]
        assert entry["wire"]["theory_bytes"] == factor * size
        assert entry["wire_bytes_per_step"] == pytest.approx(factor * size, rel=0.1)
        for rank in entry["ranks"]:
            assert rank["wire"]["sent"] == pytest.approx(rank["wire"]["theory_sent"], rel=0.15)
            assert rank["wire"]["received"] == pytest.approx(rank["wire"]["theory_received"], rel=0.15)
    step = {name: entry["step_ms"]["median"] for name, entry in runs.items()}
    wire_ms = size * 8 / 400e6 * 1e3
    assert step["gather-scatter"] > 5 * wire_ms, "the root's link cannot be faster than it is"
    assert step["gather-scatter"] > 1.5 * step["all-reduce"]
    assert step["all-reduce"] > 1.3 * wire_ms


def _port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_the_same_command_under_torchrun(tmp_path):
    where = ("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", _port())
    launcher = [*TORCHRUN, *where, "-m", "syncline"]
    args = ("compare", "--strategies", "single,ddp", *MODEL, "--out", "run")
    done = Command(*args, cwd=tmp_path, program=launcher).finish()
    assert done.code == 0, done.err
    assert done.left() == []
    single, ddp = results(tmp_path / "run")["runs"]
    check_run(single, world_size=1)
    check_run(ddp, world_size=2)
    assert done.out.count("report: ") == 1, "rank 0 alone speaks"


def test_the_same_command_as_ranks_of_any_launcher(tmp_path):
    args = ("--strategies", "single,all-reduce,server,ddp", *MODEL, "--batch", "12", "--out", "run")
    ranks = [rank.finish() for rank in launched("compare", *args, ranks=3, cwd=tmp_path)]
    for rank in ranks:
        assert rank.code == 0, rank.err
    single, reduced, server, ddp = results(tmp_path / "run")["runs"]
    check_run(single, world_size=1)
    check_run(reduced, world_size=3)
    check_run(server, world_size=2)
    check_run(ddp, world_size=3)
    assert server["servers"] == 1
    assert ["report: " in rank.out for rank in ranks] == [True, False, False]


def test_a_failing_strategy_of_launched_ranks_leaves_the_others(tmp_path):
    args = ("--model", "faulty:raising", "--batch", "8", "--steps", "4", "--set", "train.timeout_s=20", "--out", "run")
    ranks = launched("compare", "--strategies", "all-reduce,single", *args, ranks=2, cwd=tmp_path)
    for done in [rank.finish() for rank in ranks]:
        assert done.code == 0, done.err
    crash, single = results(tmp_path / "run")["runs"]
    assert (crash["status"], crash["error"]["rank"]) == ("crashed", 1)
    assert "broke on purpose" in crash["error"]["summary"]
    check_run(single, world_size=1, steps=4)


@pytest.mark.full  # one agent is above, ranks on nodes are in `cluster/test_cluster_run.py`
@pytest.mark.namespaces
def test_two_torchrun_agents_in_two_namespaces(tmp_path):
    agent = (
        f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank $NODE_RANK "
        "--master-addr $MASTER_ADDR --master-port $MASTER_PORT -m syncline compare --strategies ddp "
        "--model 'mlp(hidden=64)' --batch 16 --steps 3 --set train.test_samples=0 --out run"
    )
    done = run("cluster", "--nodes", "2", "--bandwidth", "1Gbit", "--", "sh", "-c", agent, cwd=tmp_path)
    assert done.code == 0, (done.out, done.err)
    content = results(tmp_path / "run")
    assert content["network"]["emulated"]
    assert content["network"]["nodes"] == 2
    (entry,) = content["runs"]
    check_run(entry, world_size=2, steps=3)
    assert entry["wire"]["measured"]
    assert entry["wire_bytes_per_step"] == pytest.approx(entry["wire"]["theory_bytes"], rel=0.1)


@pytest.mark.full  # ranks of any launcher are above, ranks on nodes without torchrun in `cluster/test_cluster_run.py`
@pytest.mark.namespaces
def test_as_the_command_of_a_cluster_without_torchrun(tmp_path):
    own = f"{sys.executable} -m syncline compare --strategies ddp,server --model 'mlp(hidden=16)' --batch 6 --steps 3"
    done = run("cluster", "--nodes", "2", "--", "sh", "-c", own + " --out run", cwd=tmp_path)
    assert done.code == 0, (done.out, done.err)
    ddp, server = results(tmp_path / "run")["runs"]
    check_run(ddp, world_size=2, steps=3)
    check_run(server, world_size=1, steps=3)


def test_scaling_over_world_sizes(tmp_path):
    args = ("--recipe", "horovod-scaling", "--scale", "1,2", "--model", "mlp(hidden=64)", "--batch", "16")
    small = ("--steps", "4", "--epochs", "3", "--set", "train.test_samples=16", "--out", "run")
    done = call("compare", *args, *small, cwd=tmp_path)
    assert done.code == 0, done.err
    one, two = results(tmp_path / "run")["runs"]
    check_run(one, world_size=1, steps=12)
    check_run(two, world_size=2, steps=6)
    assert (one["batch"], two["batch"]) == (16, 32), "an epoch keeps its samples"
    assert [len(entry["epochs"]) for entry in (one, two)] == [3, 3]
    assert all(epoch["test_s"] > 0 for epoch in one["epochs"])
    assert "epoch" in done.out
    assert "eff" in done.out
