"""A real Slurm cluster on emulated nodes: munged, slurmctld and one slurmd for each node."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from syncline.cluster import Cluster
from syncline.cluster.guard import start_guarded

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
SETTINGS = """\
ClusterName=test
SlurmctldHost=node0({head})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
KillWait=2
BatchStartTimeout=100
MessageTimeout=100
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]


class Slurm:
    """Runs commands on the first node, as a user who has logged in there."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder, self.log = cluster, folder, folder / "daemons.log"

    def start(self, *command: str, node: int, output: int) -> "subprocess.Popen[bytes]":
        """Start a command on a node that has its own host name and knows those of the others."""
        script = f'mount --bind {self._folder}/hosts /etc/hosts && hostname node{node} && exec "$@"'
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # jobs find torchrun where the tests run
        environment = {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": programs}
        whole = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command]
        return start_guarded(whole, environment=environment, namespace=self._cluster.nodes[node].netns, output=output)

    def run(self, *command: str) -> tuple[int, str]:
        """The exit code and the output of a command."""
        file = self._folder / f"{time.monotonic_ns()}.txt"
        with file.open("wb") as output:
            code = self.start(*command, node=0, output=output.fileno()).wait()
        return code, file.read_text()


@contextmanager
def slurm(nodes: int, folder: Path) -> Iterator[Slurm]:
    """A cluster of Slurm, ready for jobs; nothing of it is left after the block."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(nodes))
        made = Slurm(cluster, folder)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        rows = [f"NodeName=node{n.index} NodeAddr={n.address} CPUs=1 State=UNKNOWN" for n in cluster.nodes]
        settings = {"folder": folder, "head": cluster.nodes[0].address, "nodes": "\n".join(rows)}
        (folder / "slurm.conf").write_text(SETTINGS.format(**settings))
        names = "".join(f"{n.address} node{n.index}\n" for n in cluster.nodes)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for name in ("state", *(f"spool-node{n.index}" for n in cluster.nodes)):
            (folder / name).mkdir()
        log = stack.enter_context(made.log.open("wb"))
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files]
        processes = [start_guarded(munged, environment={}, output=log.fileno())]
        stack.callback(_end, processes)
        _until(lambda: (folder / "munge.socket").exists(), made)
        processes.append(made.start("slurmctld", "-D", node=0, output=log.fileno()))
        for node in range(nodes):
            processes.append(made.start("slurmd", "-D", "-N", f"node{node}", node=node, output=log.fileno()))
        _until(lambda: made.run("sinfo", "--noheader", "--format=%D %t")[1].strip() == f"{nodes} idle", made)
        yield made


def _until(condition: Callable[[], bool], made: Slurm) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, made.log.read_text()
        time.sleep(0.1)


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        process.wait()
