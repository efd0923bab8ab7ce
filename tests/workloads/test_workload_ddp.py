"""Every phase works inside DDP on two real ranks, buffers broadcast, and the ranks stay equal."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from workload_cases import TINY

from ranks import run_ranks
from syncline.train.workload import build, load_optimizer


def _train(rank: int, world_size: int, model: str, data: str) -> list[float]:
    workload = build(model, data, seed=7)
    phases = [(DistributedDataParallel(phase.module), phase) for phase in workload.phases]
    optimizers = [load_optimizer(phase.optimizer, phase.module.parameters()) for phase in workload.phases]
    for step in range(2):
        samples = workload.train.batch(torch.arange(2) + 2 * (rank + world_size * step))
        for (wrapped, phase), optimizer in zip(phases, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            others = {id(p): p.grad for _, other in phases for p in other.module.parameters() if other is not phase}
            wrapped(*samples).backward()
            for _, other in phases:
                if other is not phase:
                    # No gradient of this phase may reach the other one's parameters.
                    assert all(p.grad is others[id(p)] for p in other.module.parameters())
            optimizer.step()
    return [float(p.double().sum()) for phase in workload.phases for p in phase.module.parameters()]


@pytest.mark.parametrize(("model", "data"), TINY)
def test_ddp(model: str, data: str) -> None:
    first, second = run_ranks(_train, 2, model, data)
    assert first == second
    assert all(value == value for value in first)
