"""A loop of plain DDP with BatchNorm. `--slow` puts a cause of slowness in; docs/why-slow.md finds it again.

Run it with torchrun, or on emulated nodes:
`syncline cluster --nodes 2 --bandwidth 100Mbit -- python examples/ddp_loop.py`.
On a GPU it is recorded by torch's profiler, which sees kernels: `torchrun examples/ddp_loop.py --device cuda`.
"""

import argparse
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import syncline.trace


class Images(Dataset):
    """Images of ten classes, a pattern each and noise; `seconds` are what reading one takes more than it should."""

    def __init__(self, seconds: float, device: str) -> None:
        self.seconds = seconds
        random = torch.Generator().manual_seed(0)
        labels = torch.arange(4096) % 10
        images = torch.randn(10, 3, 32, 32, generator=random)[labels]
        images += torch.randn(4096, 3, 32, 32, generator=random)
        self.images, self.labels = images.to(device), labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds * len(indices))
        return self.images[indices], self.labels[indices]


class Network(nn.Module):
    """A small convolutional network with BatchNorm; `seconds` are what a forward pass takes more."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        layers: list[nn.Module] = []
        for a, b in pairwise([3, width, 2 * width, 4 * width]):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, x: Tensor) -> Tensor:
        """The ten scores of each image."""
        time.sleep(self.seconds)
        return self.layers(x)


def loss_by_sample(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean loss, computed image by image in Python: thousands of tiny kernels."""
    return torch.stack([nn.functional.cross_entropy(s, label) for s, label in zip(scores, labels, strict=True)]).mean()


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", choices=["nothing", "reading", "rank", "python"], default="nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", type=Path, default=Path("syncline-trace"))
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("there is no device 'cuda' here: leave --device out")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    late = 0.06 if given.slow == "rank" and rank == 1 else 0.0
    model = DistributedDataParallel(Network(late, 128 if on_gpu else 32).to(given.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Images(0.003 if given.slow == "reading" else 0.0, given.device)
    sampler = BatchSampler(DistributedSampler(data, world, rank), 1024 if on_gpu else 32, drop_last=True)
    loader = DataLoader(data, batch_size=None, sampler=sampler)
    loss_of = loss_by_sample if given.slow == "python" else nn.functional.cross_entropy

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    if on_gpu:
        profiled(step, loader, given.trace / f"rank{rank}.json.gz", given.steps)
    else:
        with syncline.trace.recording(model, optimizer, path=given.trace) as recording:
            for x, y in islice(recording.data(loader), given.steps):
                step(x, y)
    dist.destroy_process_group()


def profiled(step: Callable[[Tensor, Tensor], None], loader: DataLoader, path: Path, steps: int) -> None:
    """Train and record the last ten steps with torch's profiler."""
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = (batch for _ in range(steps) for batch in loader)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=steps - 12, warmup=2, active=10),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
    ) as profiler:
        for x, y in islice(batches, steps):
            step(x, y)
            profiler.step()


if __name__ == "__main__":
    main()
