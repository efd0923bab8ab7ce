"""A loop of plain DDP, recorded by one line. `--slow` puts a cause of slowness in; docs/why-slow.md finds it again.

Run it with torchrun, or on emulated nodes:
`syncline cluster --nodes 2 --bandwidth 100Mbit -- python examples/ddp_loop.py`.
"""

import argparse
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import syncline.trace


class Images(Dataset):
    """Images of ten classes, a pattern each and noise; `seconds` are what reading one takes more than it should."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return self.patterns[index % 10] + noise, index % 10


class Network(nn.Module):
    """A small convolutional network with BatchNorm, 2.2 million parameters; a forward pass takes `seconds` more.

    DDP sends rank 0's BatchNorm statistics to all ranks at the start of every forward pass: a late rank is waited for
    there.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        widths = [3, 32, 64, 128]
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The ten scores of each image."""
        time.sleep(self.seconds)
        return self.layers(x)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", choices=["nothing", "reading", "rank"], default="nothing")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", default="syncline-trace")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    late = 0.06 if given.slow == "rank" and rank == 1 else 0.0
    model = DistributedDataParallel(Network(late))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Images(0.003 if given.slow == "reading" else 0.0)
    sampler = torch.utils.data.DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    with syncline.trace.recording(model, optimizer, path=given.trace) as recording:
        for step, (x, y) in enumerate(recording.data(loader)):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == given.steps:
                break
    if rank == 0:
        print(f"loss {loss.item():.4f} after {given.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
