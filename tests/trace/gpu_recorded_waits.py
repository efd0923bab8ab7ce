"""Records BatchNorm loops on two ranks of one GPU and prints what is found: `python gpu_recorded_waits.py FOLDER`."""

import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline.trace import analyze, recording

LATE_S, STEPS, WIDTH = 0.03, 24, 512


def train(rank, folder, store):
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for late in (None, 0, 1):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*layers).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(64, WIDTH, device=device)
        with recording(model, optimizer, path=Path(folder) / f"late-{late}", every=1):
            for _ in range(STEPS):
                if rank == late:
                    time.sleep(LATE_S)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.synchronize()
        del model
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(train, args=(sys.argv[1], f"{scratch}/store"), nprocs=2)
    for path in sorted(Path(sys.argv[1]).iterdir()):
        told = analyze(path)
        print(path.name, told.verdict.kind, told.verdict.sentence, told.verdict.recoverable_ms)
        for row in told.ranks:
            print("  rank", row.rank, {phase: round(ms, 2) for phase, ms in row.breakdown_ms.items() if ms > 0.01})
        print("  step", told.step_ms, "units", [(unit.unit, round(unit.wait_ms, 2)) for unit in told.units])
