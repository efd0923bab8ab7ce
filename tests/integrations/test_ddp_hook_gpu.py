"""The hook and the wrapper over NCCL: two ranks on one device that NCCL sees as two hosts."""

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
]
STEPS = 8


def train(rank: int, wrap: Any) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10)
    ).cuda()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(10 * step + rank)
        x = torch.randn(32, 256, device="cuda", generator=generator)
        loss = F.mse_loss(wrapped(x), x[:, :10])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    if isinstance(wrapped, syncline.DistributedDataParallel):
        assert "add_param_group" in vars(optimizer), "it was found"
        wrapped.close()
    return seen, float(loss)


def hooked(spec: str, states: list[Any]) -> Any:
    def wrap(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        states.append((ddp, *syncline.ddp_hook(spec)))
        ddp.register_comm_hook(*states[-1][1:])
        return ddp

    return wrap


def nccl_rank(rank: int, world: int, folder: str) -> None:
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    plain, _ = train(rank, DistributedDataParallel)
    for wrap in (hooked("none", []), syncline.DistributedDataParallel):
        seen, _ = train(rank, wrap)
        assert all(torch.equal(t, seen[name]) for name, t in plain.items())
    for spec in ("powersgd(rank=8)", "acpsgd(rank=8) | bf16", "topk(0.1)", "int8"):
        states: list[Any] = []
        seen, loss = train(rank, hooked(spec, states))
        for tensor in seen.values():
            both = [torch.empty_like(tensor) for _ in range(world)]
            dist.all_gather(both, tensor)
            assert torch.equal(*both), spec
        ((ddp, state, _),) = states
        kept = state.state_dict(ddp)
        assert int(kept.pop("syncline.step")) == STEPS
        assert all(t.isfinite().all() and t.is_cuda for t in kept.values())
        assert any(t.any() for t in kept.values()) or spec == "int8"
        assert loss < 2, (spec, loss)
        state.close()
    dist.destroy_process_group()


def test_hook_and_wrapper_over_nccl() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(nccl_rank, (2, folder), nprocs=2)
