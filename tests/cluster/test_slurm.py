"""The sbatch template of docs/launch.md, submitted to a real Slurm on two emulated nodes."""

import json
import os
import re
from pathlib import Path

import pytest
from slurm import missing, slurm

pytestmark = [pytest.mark.namespaces, pytest.mark.full, pytest.mark.alone]
PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
SHORTER = [
    (r"--nodes=4", "--nodes=2"),
    (r"--cpus-per-task=16", "--cpus-per-task=1"),
    (r"#SBATCH --gpus-per-node=1\n", ""),
    (r"--strategies \S+ --model \S+ --batch 256 --steps 50", "--strategies ddp --model mlp --batch 8 --steps 3"),
    (r"(--out run-\$SLURM_JOB_ID)", r"\1 --set train.test_samples=0"),
]
"""What is different from the template: a smaller machine and a shorter run."""


def template() -> str:
    (text,) = [block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "#SBATCH" in block]
    for pattern, replacement in SHORTER:
        assert re.search(pattern, text), pattern
        text = re.sub(pattern, replacement, text)
    return text


@pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())}")
@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root")
@pytest.mark.timeout(240)
def test_the_template_runs_on_two_nodes_of_slurm(tmp_path: Path) -> None:
    folder, job = tmp_path / "slurm", tmp_path / "job"
    folder.mkdir()
    job.mkdir()
    (job / "job.sh").write_text(template())
    with slurm(2, folder) as cluster:
        code, output = cluster.run("sbatch", "--wait", f"--chdir={job}", f"--output={job}/out.txt", str(job / "job.sh"))
        log = (job / "out.txt").read_text() if (job / "out.txt").exists() else cluster.log.read_text()
    assert code == 0, f"{output}\n{log}"
    (run,) = json.loads((job / "run-1" / "results.json").read_text())["runs"]
    assert (run["strategy"], run["status"], run["world_size"], len(run["loss"])) == ("ddp", "ok", 2, 3)
    assert [(rank["node"], rank["host"]) for rank in run["ranks"]] == [(0, "node0"), (1, "node1")]
