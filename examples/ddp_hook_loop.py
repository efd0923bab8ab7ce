"""A DDP loop with one of Syncline's codecs as its communication hook; everything else is DDP's.

Run it with torchrun, or on emulated nodes:
`syncline cluster --nodes 2 --bandwidth 200Mbit -- python examples/ddp_hook_loop.py`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncline


def main() -> None:
    """Train, and print the last loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", default="powersgd(rank=4)")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    model = DistributedDataParallel(layers.to(device))
    model.register_comm_hook(*syncline.ddp_hook(given.compress))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(given.steps):
        x = torch.randn(32, 64, generator=samples).to(device)
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
