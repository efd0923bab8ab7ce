"""Rank functions of the recording tests, in a module so that other processes can import them."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.trace import recording, start, stop

WIDTH, BATCH, LAYERS = 64, 8, 4
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
BUCKET_MB = LAYER_BYTES / (1 << 20)  # one layer per bucket


def bf16_hook(state, bucket):
    """A user's own: torch's, which it refuses by name on a CPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


class Loop:
    """A model under `kind`, and a loop over fixed batches."""

    def __init__(self, rank, kind, *, bucket_view=False):
        torch.manual_seed(0)
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.model, self.sync = self.inner, None
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1, momentum=0.9)
        if kind in ("ddp", "bf16"):
            self.model = DistributedDataParallel(
                self.inner, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=bucket_view
            )
        if kind == "bf16":
            self.model.register_comm_hook(None, bf16_hook)
        if kind == "attach":
            self.sync = syncline.attach(self.inner, self.optimizer, tune=False)
        self.numbers = torch.Generator().manual_seed(rank)

    def step(self, *, passes=1):
        for _ in range(passes):
            self.model(torch.randn(BATCH, WIDTH, generator=self.numbers)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self):
        if self.sync is not None:
            self.sync.close()
        return torch.cat([p.detach().flatten() for p in self.inner.parameters()])


def hooks(loop):
    """All hooks and replaced functions that a recording could leave behind."""
    from torch.optim import optimizer

    if loop.sync is not None:
        getattr(
            loop.sync, "sync", loop.sync
        ).wait()  # an attached engine has hooks of its own while something is in flight
    return {
        "forward": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loop.model.modules()],
        "steps": len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks),
        "own steps": len(loop.optimizer._optimizer_step_pre_hooks) + len(loop.optimizer._optimizer_step_post_hooks),
        "backward": torch.autograd.backward.__qualname__,
        "collectives": [
            getattr(dist, name).__qualname__ for name in ("all_reduce", "barrier", "destroy_process_group")
        ],
        "all modules": len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks),
    }


def with_and_without(rank, world_size, kind, folder, bucket_view=False):
    """Train twice, the second time partly recorded. Whether parameters are equal, and hooks before and after."""
    plain = Loop(rank, kind, bucket_view=bucket_view)
    for _ in range(9):
        plain.step()
    expected = plain.close()
    loop = Loop(rank, kind, bucket_view=bucket_view)
    before = hooks(loop)
    loop.step()
    for number in range(2):
        with recording(loop.model, loop.optimizer, path=Path(folder) / str(number)):
            for _ in range(3):
                loop.step()
            during = hooks(loop)
        loop.step()
    assert during != before
    after = hooks(loop)
    return torch.equal(loop.close(), expected), before == after


def sampled(rank, world_size, kind, folder):
    loop = Loop(rank, kind)
    with recording(loop.model, loop.optimizer, path=folder, every=3):
        for _ in range(8):
            loop.step()
    loop.close()


def by_environment(rank, world_size, kind, folder):
    """With the environment variable only. The trace is written when the process group is destroyed."""
    os.environ.update(SYNCLINE_TRACE=folder, SYNCLINE_TRACE_EVERY="2")
    if kind == "wrapper":
        loop = Loop(rank, "plain")
        loop.model = syncline.DistributedDataParallel(loop.inner, tune=False)
        loop.sync = loop.model
    else:
        loop = Loop(rank, kind)
    if kind == "ddp":  # as `import syncline` would have done it
        from syncline.trace.record.session import start_if_requested

        start_if_requested()
    for _ in range(6):
        loop.step()
    loop.close()
    dist.barrier()
    dist.destroy_process_group()
    left = hooks(loop)["steps"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the helper ends one
    return left


def crashing(rank, world_size, folder, who):
    loop = Loop(rank, "ddp")
    before = hooks(loop)
    try:
        with recording(loop.model, loop.optimizer, path=folder):
            for number in range(4):
                loop.step()
                if number == 2 and rank in who:
                    raise ValueError("the batch is broken")
    except ValueError as error:
        return str(error), hooks(loop) == before
    return "", hooks(loop) == before


def crashing_alone(rank, world_size, folder, who):
    """One rank fails; the other is blocked in a collective until the failed one leaves the group."""
    loop = Loop(rank, "ddp")
    caught = ""
    try:
        with recording(loop.model, loop.optimizer, path=folder):
            for number in range(5):
                loop.step()
                if number == 2 and rank == who:
                    raise ValueError("the batch is broken")
    except (ValueError, RuntimeError) as error:
        caught = type(error).__name__
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the helper ends one
    return caught


def alone(rank, world_size, folder, who):
    """Only rank `who` records."""
    loop = Loop(rank, "ddp")
    if rank == who:
        start(folder, model=loop.model, optimizer=loop.optimizer, timeout=0.5)
    for _ in range(3):
        loop.step()
    path = stop()
    dist.barrier()
    return None if path is None else str(path)


def several_passes(rank, world_size, folder):
    """Gradients are accumulated over three passes, two of them without an exchange, and the model is called twice."""
    loop = Loop(rank, "ddp")
    with recording(loop.model, loop.optimizer, path=folder) as running:
        for _ in range(3):
            for _ in running.data(range(2)):
                with loop.model.no_sync():
                    loop.model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            first, second = (loop.inner(torch.randn(BATCH, WIDTH)) for _ in range(2))
            del first, second
            loop.step()
            with torch.no_grad():
                loop.model(torch.randn(BATCH, WIDTH))
            time.sleep(0.01)
            nn.utils.clip_grad_norm_(loop.inner.parameters(), 1.0)


def by_hand(rank, world_size, folder):
    """A loop that averages its gradients itself, with blocking collectives."""
    loop = Loop(rank, "plain")
    with recording(loop.model, loop.optimizer, path=folder):
        begun = time.perf_counter_ns()
        for _ in range(4):
            loop.model(torch.randn(BATCH, WIDTH, generator=loop.numbers)).square().mean().backward()
            if rank == 1:
                time.sleep(0.02)
            for p in loop.inner.parameters():
                dist.all_reduce(p.grad)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        ended = time.perf_counter_ns()
    return ended - begun
