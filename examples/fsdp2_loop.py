"""FSDP2 with Syncline: torch shards the model inside a node, Syncline compresses the all-reduce between nodes.

Run it with torchrun on several nodes, or on two emulated nodes with two ranks each:
`syncline cluster --nodes 2 --bandwidth 1Gbit --nproc-per-node 2 -- python examples/fsdp2_loop.py`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import syncline


class Blocks(nn.Module):
    """Some layers that are sharded one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 8)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The eight values of each sample."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


def main() -> None:
    """Train, and print the last loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", default="powersgd(rank=4) | bf16")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // per_node
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    sync = syncline.fsdp.attach(model, replicate=mesh["replicate"], compress=given.compress)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(given.steps):
        x = torch.randn(32, 64, generator=samples).to(mesh.device_type)
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
