"""Flight-recorder dumps of invented jobs, made from an entry of a real dump: each rank's calls and states."""

import copy
import json
import pickle
from pathlib import Path

FLIGHT = Path(__file__).parent / "fixtures" / "flight"
WORLD = 4
_START, _STEP, _APART = 1_800_000_000_000_000_000, 50_000_000, 200_000
REAL = pickle.loads((FLIGHT / "gloo-healthy" / "comm_lib_trace_rank_0").read_bytes())


class Job:
    """Four ranks that call the same collectives in step, until a test changes something."""

    def __init__(self, backend="nccl", *, world=WORLD, groups=()):
        self.backend, self.world = backend, world
        self.groups = {"0": tuple(range(world)), **dict(groups)}
        self.entries = {rank: [] for rank in range(world)}
        self.lost = ()
        self.now = _START

    def call(self, op="all_reduce", size=4096, *, group="0", ranks=None, state="completed", late=None, **fields):
        """All ranks of a group (or these) call a collective; `late` has ms by rank."""
        members = self.groups[group] if ranks is None else ranks
        for rank in members:
            self.add(
                rank, op, size, group=group, state=state, at=self.now + int(1e6 * (late or {}).get(rank, 0)), **fields
            )
        self.now += _STEP
        return self

    def add(
        self, rank, op="all_reduce", size=4096, *, group="0", state="completed", at=None, dtype="Float", number=None,
        p2p=False,
    ):  # fmt: skip
        """One rank calls something."""
        mine, entry = self.entries[rank], copy.deepcopy(REAL["entries"][0])
        p2p = op.startswith(("send", "recv")) or p2p
        before = [one for one in mine if one["process_group"][0] == group and one["is_p2p"] == p2p]
        done = state == "completed"
        created = (self.now if at is None else at) + _APART * rank
        entry |= {
            "record_id": len(mine), "process_group": (group, "default_pg" if group == "0" else "undefined"),
            "collective_seq_id": (number or len(before) + 1), "p2p_seq_id": (number or len(before) + 1) if p2p else 0,
            "profiling_name": f"{self.backend}:{op}", "is_p2p": p2p, "time_created_ns": created, "retired": done,
            "input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": [dtype], "output_dtypes": [dtype],
        }  # fmt: skip
        if self.backend == "nccl":
            seen = created + 1_000_000
            entry["state"] = state
            entry["time_discovered_started_ns"] = None if state == "scheduled" else seen
            entry["time_discovered_completed_ns"] = seen if done else None
        mine.append(entry)

    def steps(self, count=5, **fields):
        """Steps with two all-reduces each."""
        for _ in range(count):
            self.call(size=4096, **fields).call(size=64, **fields)
        return self

    def dump(self, rank):
        """The content of a rank's dump."""
        config = {name: {"name": name, "desc": "", "ranks": str(list(ranks))} for name, ranks in self.groups.items()}
        known = {name: row for name, row in config.items() if rank in self.groups[name]}
        known = known if self.backend == "nccl" else REAL["pg_config"]
        return REAL | {"entries": self.entries[rank], "pg_config": known}

    def write(self, folder, *, text=False):
        """Write a file for each rank, those that are `lost` excepted."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.entries:
            if rank in self.lost:
                continue
            content = self.dump(rank)
            data = _as_text(content) if text else pickle.dumps(content, protocol=2)
            (folder / f"comm_lib_trace_rank_{rank}").write_bytes(data)
        return folder


def _as_text(content):
    """As torch writes JSON: without stacks, and with 0 for unknown times."""
    entries = [
        {key: value or 0 if "time" in key else value for key, value in one.items()} for one in content["entries"]
    ]
    for entry in entries:
        del entry["frames"]
    return json.dumps(content | {"entries": entries}, sort_keys=True).encode()
