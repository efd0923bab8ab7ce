"""Makes the torch.profiler traces under `fixtures/waits/`: `python tests/trace/make_wait_fixtures.py [--backend nccl]`.

Real runs with a rank that is late on purpose. Events and arguments that the import does not read are cut out.
NCCL needs one CUDA device: all ranks use it, as if they were on hosts of their own.
"""

import argparse
import gzip
import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

FOLDER = Path(__file__).parent / "fixtures" / "waits"
LATE_S, WIDTH, BATCH, ACTIVE = 0.04, 64, 32, 4
WORLD = {"batchnorm": 2, "mesh": 4}
KEPT_ARGS = (
    "correlation", "stream", "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Input Dims", "Input type",
    "Process Group Name", "Process Group Ranks", "Group size", "Seq", "External id",
)  # fmt: skip


def batchnorm(rank, device):
    """DDP sends rank 0's buffers at the start of forward; rank 0 is late with its data."""
    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))

    def load():
        with torch.profiler.record_function("data"):
            time.sleep(LATE_S if rank == 0 else 0.0)
            return torch.randn(BATCH, WIDTH, device=device)

    return model, load


def mesh(rank, device):
    """Pairs (0, 1) and (2, 3) average activations in forward; DDP averages gradients over (0, 2) and (1, 3)."""
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    across = [dist.new_group(members) for members in ([0, 2], [1, 3])]

    class Parallel(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            dist.all_reduce(y.detach(), group=pairs[rank // 2])
            return y

    model = nn.Sequential(Parallel(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device)

    def load():
        with torch.profiler.record_function("data"):
            time.sleep(LATE_S if rank == 3 else 0.0)
            return torch.randn(BATCH, WIDTH, device=device)

    return DistributedDataParallel(model, process_group=across[rank % 2]), load


def train(rank, loop, backend, folder, out):
    world = WORLD[loop]
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model, load = {"batchnorm": batchnorm, "mesh": mesh}[loop](rank, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = Path(folder) / f"rank{rank}.json"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if backend == "nccl" else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=2, warmup=1, active=ACTIVE, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(3 + ACTIVE):
            model(load()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()
    out = Path(out) / f"{loop}-{backend}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank{rank}.json.gz").write_bytes(gzip.compress(cut(path.read_text()).encode(), 9, mtime=0))


def cut(text):
    """The trace without flows, metadata events, and arguments that the import does not read."""
    trace = json.loads(text)
    events = [event for event in trace.pop("traceEvents") if event.get("ph") == "X"]
    for event in events:
        event["args"] = {key: value for key, value in event.get("args", {}).items() if key in KEPT_ARGS}
        if event.get("cat") == "cpu_op" and "c10d" not in event["name"] and "comms" not in event["name"]:
            event["args"] = {}
    for key in ("deviceProperties", "traceName", "trace_id"):
        trace.pop(key, None)
    return json.dumps(trace | {"traceEvents": events}, separators=(",", ":"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--out", default=str(FOLDER))
    chosen = parser.parse_args()
    for name in WORLD:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, args=(name, chosen.backend, folder, chosen.out), nprocs=WORLD[name])
