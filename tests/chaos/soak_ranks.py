"""A program for a sandbox: ranks attach, train, save their state and close, again and again, for a number of seconds.

    python soak_ranks.py RANKS SECONDS

Prints one JSON object: for each rank, a sample after every cycle: seconds, steps, RSS in MB, threads, open files.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sandbox import folder_of_this_process
from torch import Tensor, nn

import syncline
from syncline.plan import Shape, default_plan

STEPS = 60
CODECS = (None, "bf16", "powersgd(rank=2)", "topk(0.1)", "dgc(0.1)", "int8")


def cycle(rank: int, codec: str | None, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Attach with a codec, continue from `state`, train and close; returns the state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    shapes = [Shape(name, tuple(p.shape)) for name, p in net.named_parameters()]
    sync = syncline.attach(net, optimizer, plan=default_plan(shapes, compress=codec), sentinel=20)
    if state:
        sync.load_state_dict(state)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        F.mse_loss(net(torch.randn(8, 32, generator=generator)), torch.zeros(8, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = sync.state_dict()
    sync.close()
    return state


def sample(begin: float, steps: int) -> dict[str, Any]:
    """What this process uses now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "s": round(time.monotonic() - begin, 1),
        "steps": steps,
        "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(status["Threads"]),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
    }


def train(rank: int, ranks: int, seconds: float, folder: str) -> list[dict[str, Any]]:
    """Cycles until rank 0 says that the time is over."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    begin, samples, state, number = time.monotonic(), [], {}, 0
    going = torch.ones(1)
    while going:
        # Every codec, then the next one with the state that the one before it has left.
        state = cycle(rank, CODECS[number % len(CODECS)], state)
        number += 1
        if number % len(CODECS) == 0:
            samples.append(sample(begin, number * STEPS))
            going = torch.tensor([float(time.monotonic() - begin < seconds)])
            dist.broadcast(going, src=0)
    dist.destroy_process_group()
    return samples


def main(ranks: int, seconds: float) -> None:
    """Start the ranks and print their samples."""
    with folder_of_this_process() as folder:
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                samples = train(rank, ranks, seconds, folder)
                Path(folder, f"{rank}.json").write_text(json.dumps(samples))
                sys.exit(0)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0] * ranks, codes
        print(json.dumps([json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
