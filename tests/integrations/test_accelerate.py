"""Hugging Face Accelerate on real ranks: `prepare` equals its DDP, `SynclineKwargs` compresses, state resumes."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ranks import run_ranks, run_until_killed
from syncline.errors import UsageError
from syncline.integrations.accelerate import SynclineKwargs, engines, prepare, sync_of

STEPS = 20


def environment(rank: int, world: int) -> None:
    """What torchrun sets."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")


def workload() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
    )
    x = torch.randn(8 * 2 * 2 * STEPS, 20)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        DataLoader(TensorDataset(x, x[:, :5].sin()), batch_size=8),
    )


def losses_of(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, steps: range = range(STEPS)
) -> list[float]:
    """Accelerate's own loop: accumulation over two batches, clipping, mixed precision."""
    losses = []
    for number, (x, y) in enumerate(loader):
        if number // 2 not in steps:
            continue
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in getattr(model, "module", model).parameters()]


def new_accelerator(*handlers: Any) -> Accelerator:
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, kwargs_handlers=list(handlers)
    )
    assert accelerator.num_processes == 2
    return accelerator


def dense(rank: int, world: int) -> dict[str, Any]:
    environment(rank, world)
    results = {}
    for way in ("ddp", "prepare", "hook"):
        accelerator = new_accelerator(*[SynclineKwargs(compress="none", broadcast_buffers=True)] * (way == "hook"))
        model, optimizer, loader = workload()
        make = partial(prepare, accelerator) if way == "prepare" else accelerator.prepare
        model, optimizer, loader = make(model, optimizer, loader)
        results[way] = (losses_of(accelerator, model, optimizer, loader), [w.tolist() for w in weights(model)])
        if way == "prepare":
            sync_of(accelerator, model).close()
        accelerator.free_memory()
    return results


def test_the_engine_and_the_hook_give_the_losses_of_accelerates_ddp() -> None:
    for result in run_ranks(dense, 2):
        assert len(result["ddp"][0]) == 2 * STEPS
        assert result["prepare"] == result["ddp"]
        assert result["hook"] == result["ddp"]


def odd_uses(rank: int, world: int) -> dict[str, Any]:
    """A synchronised pass inside `no_sync`, a model that is prepared twice, and buffers that stay local."""
    environment(rank, world)
    results: dict[str, Any] = {}
    for way in ("ddp", "prepare"):
        arguments = DistributedDataParallelKwargs(broadcast_buffers=False)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[arguments])
        model = workload()[0]
        for _ in range(2):
            make = partial(prepare, accelerator) if way == "prepare" else accelerator.prepare
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer, loader = make(model, optimizer, workload()[2])
            batches = iter(loader)
            with accelerator.no_sync(model):
                losses = [F.mse_loss(model(x), y) for x, y in (next(batches), next(batches))]
                accelerator.backward(losses[0])
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(losses[1])
            optimizer.step()
            optimizer.zero_grad()
            model = accelerator.unwrap_model(model)
            accelerator.free_memory()
        results[way] = [t.tolist() for t in model.state_dict().values()]
        if way == "prepare":
            results["engines"] = len(engines(accelerator))
    return results


def test_synchronised_passes_second_prepares_and_local_buffers_are_as_with_ddp() -> None:
    results = run_ranks(odd_uses, 2)
    for result in results:
        assert result["prepare"] == result["ddp"]
        assert result["engines"] == 1, "the first one was closed"
    assert results[0]["ddp"] != results[1]["ddp"], "each rank has its own statistics"


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (SynclineKwargs(compress="bf16"), "SynclineKwargs is for DDP"),
        (DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16), "DDP's comm_hook bf16"),
    ],
)
def test_codecs_for_ddp_are_refused_where_there_is_no_ddp(handler: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with pytest.raises(UsageError, match=message):
        prepare(accelerator, *workload())


def start(way: str) -> tuple[Any, Any, Any, Any]:
    """An accelerator and a workload with PowerSGD."""
    handler = SynclineKwargs(compress="powersgd(rank=4)") if way == "hook" else None
    accelerator = new_accelerator(*[handler] * (handler is not None))
    parts = workload()
    if handler is None:
        return accelerator, *prepare(accelerator, *parts, compress="powersgd(rank=4)")
    prepared = accelerator.prepare(*parts)
    handler.keep_state(accelerator)
    return accelerator, *prepared


def straight(rank: int, world: int, folder: str) -> None:
    """Save after six steps, train on, and keep what came of it."""
    environment(rank, world)
    for way in ("prepare", "hook"):
        accelerator, model, optimizer, loader = start(way)
        losses_of(accelerator, model, optimizer, loader, range(6))
        accelerator.save_state(str(Path(folder) / way))
        losses = losses_of(accelerator, model, optimizer, loader, range(6, 12))
        torch.save((losses, weights(model)), Path(folder) / f"{way}-{rank}.pt")


def resumed(rank: int, world: int, folder: str) -> dict[str, Any]:
    environment(rank, world)
    results = {}
    for way in ("prepare", "hook"):
        accelerator, model, optimizer, loader = start(way)
        accelerator.load_state(str(Path(folder) / way))
        losses = losses_of(accelerator, model, optimizer, loader, range(6, 12))
        expected, trained = torch.load(Path(folder) / f"{way}-{rank}.pt", weights_only=True)
        same = all(torch.equal(a, b) for a, b in zip(weights(model), trained, strict=True))
        results[way] = (len(losses), losses == expected, same)
    return results


@pytest.mark.full  # the Trainer, which is on Accelerate, resumes in `test_trainer.py`
def test_checkpoints_of_accelerate_resume_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    run_until_killed(straight, 2, str(tmp_path))
    for result in run_ranks(resumed, 2, str(tmp_path)):
        assert result == {"prepare": (12, True, True), "hook": (12, True, True)}
    assert len(list((tmp_path / "prepare").glob("syncline-model0-rank*-of-2.pt"))) == 2
