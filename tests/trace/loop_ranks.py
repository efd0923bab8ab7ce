"""Training loops of users, recorded on real ranks, with one rank or two that are late on purpose."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import syncline
from syncline.trace import recording

LATE_S, STEPS, BATCH, WIDTH = 0.03, 9, 4, 16


class Samples(Dataset):
    """Whole batches; reading one takes `seconds`."""

    def __init__(self, seconds):
        self.seconds, self.read = seconds, 0

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if index >= STEPS:
            raise IndexError
        time.sleep(self.seconds)
        self.read += 1
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(index))


class Slow(nn.Module):
    """A layer that sleeps in every forward pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.slept = seconds, 0

    def forward(self, x):
        time.sleep(self.seconds)
        self.slept += 1
        return x


def train(model, optimizer, batches):
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def network(seconds=0.0):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Slow(seconds), nn.Linear(WIDTH, WIDTH))


def batch_norm(rank, path, late):
    """DDP sends rank 0's buffers inside forward; rank 0 reads its samples slowly."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = Samples(LATE_S if late and rank == 0 else 0.0)
    with recording(model, optimizer, path=path):
        train(model, optimizer, DataLoader(samples, batch_size=None))
    return samples.read


def gan(rank, path):
    """Two models with an optimizer each; rank 1 is slow in the critic, which runs in both parts of the step."""
    torch.manual_seed(0)
    slow = LATE_S / 3 if rank == 1 else 0.0
    generator, critic = DistributedDataParallel(network()), DistributedDataParallel(network(slow))
    first = torch.optim.SGD(critic.parameters(), lr=0.01)
    second = torch.optim.SGD(generator.parameters(), lr=0.01)
    with recording([generator, critic], [first, second], path=path):
        for x in Samples(0.0):
            with torch.no_grad():
                fake = generator(x)
            (critic(fake).square().mean() + critic(x).square().mean()).backward()
            first.step()
            first.zero_grad()
            critic(generator(x)).square().mean().backward()
            second.step()
            second.zero_grad()
            first.zero_grad()
    return critic.module[2].slept


def mesh(rank, path, slow, *, attached=False):
    """A 2 x 2 mesh: an all-reduce inside forward in pairs (0, 1) and (2, 3), and gradients across the pairs."""
    torch.manual_seed(0)
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    across = [dist.new_group(members) for members in ([0, 2], [1, 3])]

    class Parallel(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            dist.all_reduce(y.detach(), group=pairs[rank // 2])
            return y

    delay = Slow(LATE_S if rank in slow else 0.0)
    model = nn.Sequential(delay, Parallel(WIDTH, WIDTH))
    if not attached:
        model = DistributedDataParallel(model, process_group=across[rank % 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = syncline.attach(model, optimizer, process_group=across[rank % 2], tune=False) if attached else None
    with recording(model, optimizer, path=path):
        train(model, optimizer, Samples(0.0))
    if sync is not None:
        sync.close()
    return delay.slept


def sharded(rank, path):
    """FSDP: parameters are gathered inside forward and backward. Rank 1 is slow before its second layer."""
    torch.manual_seed(0)
    delay = Slow(LATE_S if rank == 1 else 0.0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), delay, nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(model, optimizer, path=path):
        train(model, optimizer, Samples(0.0))
    return delay.slept


def loops(rank, world, folder):
    """All of them, one after the other; returns how often each delay was met on this rank."""
    folder = Path(folder)
    return {
        "quick": batch_norm(rank, folder / "quick", late=False),
        "late": batch_norm(rank, folder / "late", late=True),
        "gan": gan(rank, folder / "gan"),
        "one": mesh(rank, folder / "one", {3}),
        "pair": mesh(rank, folder / "pair", {2, 3}),
        "attached": mesh(rank, folder / "attached", {3}, attached=True),
        "sharded": sharded(rank, folder / "sharded"),
    }
