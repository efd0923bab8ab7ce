"""Makes the traces under `fixtures/`: `python tests/trace/make_fixtures.py [--backend gloo|nccl]`.

torch.profiler's are of a real DDP run of two ranks. NCCL needs one CUDA device: both ranks use it, told apart as hosts.
Horovod is not installed here: its timeline is written in the format of horovod/common/timeline.cc, with our own times.
"""

import argparse
import gzip
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

FIXTURES = Path(__file__).parent / "fixtures"
WORLD, WAIT, WARMUP, ACTIVE = 2, 2, 1, 3


class Batches(torch.utils.data.Dataset):
    """Whole batches, so that the trace is not full of collating."""

    def __len__(self):
        return WAIT + WARMUP + ACTIVE

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        generator = torch.Generator().manual_seed(index)
        return torch.randn(256, 512, generator=generator), torch.randint(0, 10, (256,), generator=generator)


def train(rank, backend, folder, out):
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 10)).to(device), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if backend == "nccl" else [])]
    plan = schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE)
    path = f"{folder}/rank{rank}.json"
    with profile(
        activities=activities, schedule=plan, record_shapes=True, on_trace_ready=lambda p: p.export_chrome_trace(path)
    ) as profiler:
        for x, y in DataLoader(Batches(), batch_size=None):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.destroy_process_group()
    out = Path(out) / f"{backend}-rank{rank}.json.gz"
    out.write_bytes(gzip.compress(Path(path).read_bytes(), 9, mtime=0))


def horovod_timeline(steps=4):
    """Two ranks, three gradients a step; rank 1 is 700 microseconds late with the second one."""
    tensors = {"fc1.weight": "[512, 512]", "fc1.bias": "[512]", "fc2.weight": "[10, 512]"}
    events = []

    def negotiate(tensor, op, ready, end):
        events.append((min(ready.values()), tensor, "B", f"NEGOTIATE_{op}", ""))
        events.extend((ts, tensor, "X", str(rank), "") for rank, ts in sorted(ready.items(), key=lambda item: item[1]))
        events.append((end, tensor, "E", "", ""))

    def run(tensor, op, start, phases):
        events.append((start, tensor, "B", op, ""))
        at = start
        for name, length in phases:
            events.extend([(at, tensor, "B", name, ""), (at + length, tensor, "E", "", "")])
            at += length
        shape = tensors[tensor.partition(".")[2]]
        events.append((at, tensor, "E", "", f', "args": {{"dtype": "float32", "shape": "{shape}"}}'))

    for i, tensor in enumerate(tensors):
        at = 1_000 + 400 * i
        negotiate(f"broadcast.{tensor}", "BROADCAST", {0: at, 1: at + 50}, at + 60)
        run(f"broadcast.{tensor}", "BROADCAST", at + 70, [("QUEUE", 10), ("NCCL_BCAST", 220)])
    phases = [("QUEUE", 30), ("WAIT_FOR_DATA", 30), ("MEMCPY_IN_FUSION_BUFFER", 30), ("NCCL_ALLREDUCE", 300)]
    phases.append(("MEMCPY_OUT_FUSION_BUFFER", 20))
    for step in range(steps):
        base = 10_000 + 8_000 * step
        events.append((base, "", "i", "CYCLE_START", ', "s": "g"'))
        for i, tensor in enumerate(tensors):
            at, late = base + 500 * i, 700 if i == 1 else 20
            negotiate(f"allreduce.{tensor}", "ALLREDUCE", {0: at, 1: at + late}, at + late + 10)
            run(f"allreduce.{tensor}", "ALLREDUCE", at + late + 20, phases)
    return horovod_json(sorted(events, key=lambda event: event[0]))


def horovod_json(events):
    """The events as Horovod's writer puts them: a tensor is a process, announced when it is first seen."""
    start = '"args": {"start_time_since_epoch_in_micros":1700000000000000}'
    text = f'[\n{{"name": "process_name", "ph": "M", "pid": 0, {start}}},\n'
    text += '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
    pids = {}
    written = []
    for ts, tensor, phase, name, extra in events:
        line = ""
        if tensor and tensor not in pids:
            pids[tensor] = pid = len(pids) + 1
            line += f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{tensor}"}}}},\n'
            line += f'{{"name": "process_sort_index", "ph": "M", "pid": {pid}, "args": {{"sort_index": {pid}}}}},\n'
        title = "" if phase == "E" else f', "name": "{name}"'
        place = f', "pid": {pids[tensor]}' if tensor else ""
        length = ', "dur": 0' if phase == "X" else ""
        written.append(f'{line}{{"ph": "{phase}"{title}, "ts": {ts}{place}{length}{extra}}}')
    return text + ",".join(written) + "]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--out", default=str(FIXTURES))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(chosen.backend, folder, chosen.out), nprocs=WORLD)
    (Path(chosen.out) / "horovod-timeline.json").write_text(horovod_timeline())
