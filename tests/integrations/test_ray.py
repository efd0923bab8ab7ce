"""Ray on a real cluster of two emulated nodes: Ray Train equals its DDP and resumes, `compare --launcher ray` runs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncline.cluster import Cluster
from syncline.cluster.capabilities import capabilities
from syncline.cluster.guard import start_guarded

pytestmark = pytest.mark.namespaces
ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Run]:
    """Runs a program beside the head of a Ray cluster. Its ports are in the namespaces of the nodes, nowhere else."""
    able = capabilities()
    if not able.can_namespaces:
        pytest.skip(able.why)
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "examples", ROOT / "tests" / "integrations")))
    environment = {
        "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "RAY_worker_register_timeout_seconds": "100", "PYTHONWARNINGS": "default", "TQDM_DISABLE": "1",
    }  # fmt: skip
    # Sockets are in this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-") as made, Cluster(2) as cluster:
        folder = Path(made)
        head, other = cluster.nodes
        variables = {**environment, "GLOO_SOCKET_IFNAME": head.interface, "RAY_ADDRESS": f"{head.address}:6379"}
        common = ["--block", "--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
        first = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
        starts = [[f"--node-ip-address={head.address}", *first], [f"--node-ip-address={other.address}"]]
        starts[1].append(f"--address={head.address}:6379")
        with (folder / "ray.log").open("wb") as log:
            nodes = [
                start_guarded(
                    [RAY, "start", *start, *common], environment=variables, namespace=node.netns, output=log.fileno()
                )
                for node, start in zip(cluster.nodes, starts, strict=True)
            ]

            def run(*command: str, timeout: float = 200) -> tuple[int, str]:
                output = folder / f"{time.monotonic_ns()}.txt"
                with output.open("wb") as file:
                    process = start_guarded(
                        [sys.executable, *command], environment=variables, namespace=head.netns, output=file.fileno()
                    )
                    try:
                        code = process.wait(timeout)
                    except subprocess.TimeoutExpired:
                        process.terminate()
                        process.wait()
                        raise
                return code, output.read_text()

            try:
                until_started(nodes, folder / "ray.log")
                yield run
            finally:
                for node in nodes:
                    node.terminate()
                    node.terminate()  # at once: nothing on it needs to be saved
                for node in nodes:
                    node.wait()


def until_started(nodes: "list[subprocess.Popen[bytes]]", log: Path) -> None:
    deadline = time.monotonic() + 90
    while log.read_text().count("Ray runtime started") < len(nodes):
        assert all(node.poll() is None for node in nodes), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_ray_train_equals_its_ddp_and_a_killed_worker_resumes(on_ray: Run, tmp_path: Path) -> None:
    code, output = on_ray(str(ROOT / "tests" / "integrations" / "ray_driver.py"), str(tmp_path))
    assert code == 0, output
    answer = json.loads((tmp_path / "answer.json").read_text())
    compared = answer.pop("compared")
    assert [row["same"] for row in compared] == [True, True], "the losses and weights of Ray's DDP, bit for bit"
    assert {row["world"] for row in compared} == {2}
    assert len({row["node"] for row in compared}) == 2, "one worker on each node"
    assert answer == {
        "fault fired": True, "attempts": 2, "steps": 20, "learned": True, "resumed equals straight": True,
        "files": ["state.pt", "syncline-model0-rank0-of-2.pt", "syncline-model0-rank1-of-2.pt"],
    }  # fmt: skip


@pytest.mark.full  # most of a minute to start Ray
@pytest.mark.timeout(240)
def test_compare_runs_on_the_nodes_of_a_ray_cluster(on_ray: Run, tmp_path: Path) -> None:
    strategy, out = "syncline(powersgd(rank=2))", tmp_path / "run"
    short = ["--model", "mlp", "--batch", "8", "--steps", "3", "--set", "train.test_samples=0"]
    code, output = on_ray(
        *("-m", "syncline", "compare", "--launcher", "ray", "--strategies", strategy, *short, "--out", str(out))
    )
    assert code == 0, output
    (run,) = json.loads((out / "results.json").read_text())["runs"]
    assert (run["strategy"], run["status"], run["world_size"], len(run["loss"])) == (strategy, "ok", 2, 3)
    assert {rank["node"] for rank in run["ranks"]} == {0, 1}
    (logs,) = (out / "runs").iterdir()
    steps = sorted(path.name for path in logs.glob("rank*.steps.jsonl"))
    assert steps == ["rank0.steps.jsonl", "rank1.steps.jsonl"], "the files of all ranks come back"
    assert f"{strategy} (2 ranks)" in output, "the progress of rank 0"
    assert (out / "report.html").exists()
