"""A plain loop with Syncline: one line, `syncline.attach`, in place of the DDP wrapper.

Run it with torchrun, or on emulated nodes:
`syncline cluster --nodes 2 --bandwidth 200Mbit -- python examples/attach_loop.py`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import syncline


def main() -> None:
    """Train, and print the last loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", default="auto", help="a codec, such as 'powersgd(rank=4)'")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = syncline.attach(model, optimizer, compress=given.compress)
    samples = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(given.steps):
        x = torch.randn(32, 64, generator=samples).to(device)
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    sync.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
