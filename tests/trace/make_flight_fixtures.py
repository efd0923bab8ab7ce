"""Makes the dumps under `fixtures/flight/`: `python tests/trace/make_flight_fixtures.py [--backend nccl]`.

Real runs of four ranks: one that is healthy, one with a rank that is late in every step, one that hangs because a rank
leaves its loop. NCCL needs one CUDA device: all ranks use it, as if they were on hosts of their own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.trace import dump_flight_recorder

FOLDER = Path(__file__).parent / "fixtures" / "flight"
WORLD, STEPS, LATE_S = 4, 5, 0.015
HANG_S = {"gloo": 3.0, "nccl": 20.0}
"""NCCL connects the ranks in their first collectives, which takes seconds."""
LATE_RANK, LOST_RANK, LOST_STEP = 1, 2, 3
CASES = ("healthy", "late", "hang")


def train_step(gradients, activations, pair):
    """Two all-reduces of gradients, and an all-gather of activations in a pair of ranks."""
    for gradient in gradients:
        dist.all_reduce(gradient)
    dist.all_gather([torch.empty_like(activations) for _ in range(2)], activations, group=pair)


def train(case, backend, rank, folder, out):
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    gradients, activations = [torch.ones(64, 32, device=device), torch.ones(32, device=device)], torch.ones(8)
    if case == "hang":
        # The loop of the other ranks will be blocked then.
        threading.Timer(HANG_S[backend], lambda: (dump_flight_recorder(out), time.sleep(1), os._exit(0))).start()
    for step in range(STEPS):
        if case == "late" and rank == LATE_RANK:
            time.sleep(LATE_S)
        if case == "hang" and rank == LOST_RANK and step == LOST_STEP:
            time.sleep(60)
        train_step(gradients, activations.to(device), pairs[rank // 2])
        if backend == "nccl":
            torch.cuda.synchronize()  # as a loop that prints its loss
    if backend == "nccl":
        time.sleep(1)  # torch's watchdog notices what is done
    dump_flight_recorder(out)
    dist.barrier()
    dist.destroy_process_group()


def start(case, backend, rank, folder, out):
    """A process of its own, so that the stacks in its dump hold this file and torch only."""
    alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_HOSTID": str(rank), "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    arguments = ["--case", case, "--backend", backend, "--rank", str(rank), "--folder", folder, "--out", str(out)]
    return subprocess.Popen([sys.executable, __file__, *arguments], env=os.environ | alone | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    chosen = parser.parse_args()
    if chosen.rank is not None:
        train(chosen.case, chosen.backend, chosen.rank, chosen.folder, chosen.out)
        sys.exit()
    for name in CASES:
        with tempfile.TemporaryDirectory() as meeting:
            target = chosen.out / f"{chosen.backend}-{name}"
            ranks = [start(name, chosen.backend, rank, meeting, target) for rank in range(WORLD)]
            assert [process.wait(timeout=90) for process in ranks] == [0] * WORLD
