"""Free memory, out-of-memory kills and memory pressure, from made-up files of the kernel."""

from pathlib import Path

import pytest

from syncline.cluster import memory

GB = 10**9


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 20 kB\nMemAvailable:    9765625 kB\n", "proc/vmstat": "pgfault 7\noom_kill 2\n"}
LIMITED = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/job/memory.current": "1000000000\n",
    "sys/fs/cgroup/user/job/memory.events": "low 0\noom 4\noom_kill 3\n",
    "sys/fs/cgroup/user/memory.max": "4000000000\n",
    "sys/fs/cgroup/user/memory.current": "3000000000\n",
    "sys/fs/cgroup/user/memory.stat": "anon 5\ninactive_file 500000000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000000000\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}


@pytest.mark.parametrize(
    ("files", "free", "kills"),
    [
        ({}, None, 0),
        (MACHINE, 10 * GB, 2),
        (MACHINE | LIMITED, 1.5 * GB, 5),
        (MACHINE | VERSION_1, 2 * GB, 3),
    ],
    ids=["no files", "no limit", "limit of a group around ours", "version 1, in a container"],
)
def test_what_is_free_and_what_was_killed(files, free, kills, tmp_path):
    root = write(tmp_path, files)
    assert memory.free_bytes(root) == free
    assert memory.oom_kills(root) == kills


def test_this_machine():
    assert memory.free_bytes() > 10**8
    assert memory.oom_kills() >= 0


def test_pressure(tmp_path):
    assert not memory.is_short(tmp_path)
    line = "some avg10={} avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    assert not memory.is_short(write(tmp_path, {"proc/pressure/memory": line.format("0.12")}))
    assert memory.is_short(write(tmp_path, {"proc/pressure/memory": line.format("61.00")}))
