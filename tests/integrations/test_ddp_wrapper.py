"""`syncline.DistributedDataParallel` instead of torch's: the same loops give the same parameters, bit for bit."""

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import syncline
from ranks import run_ranks
from syncline.errors import UsageError

STEPS = 6
Loop = Callable[[Any, int], list[torch.optim.Optimizer]]


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)
    )


def loss(model: nn.Module, rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x, y = torch.randn(6, 16, generator=generator), torch.randn(6, 4, generator=generator)
    return F.mse_loss(model(x), y)


def steps(model: Any, rank: int, optimizers: list[Any], between: Callable[[], Any] = lambda: None) -> list[Any]:
    for step in range(STEPS):
        loss(model, rank, step).backward()
        between()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


def sgd(model: Any, rank: int) -> list[Any]:
    return steps(model, rank, [SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)])


def adamw(model: Any, rank: int) -> list[Any]:
    return steps(model, rank, [AdamW(model.parameters(), lr=5e-3)])


def scheduled(model: Any, rank: int) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return steps(model, rank, [optimizer])


def two_optimizers(model: Any, rank: int) -> list[Any]:
    first = [p for name, p in model.named_parameters() if name.startswith("module.0")]
    others = [p for name, p in model.named_parameters() if not name.startswith("module.0")]
    return steps(model, rank, [SGD(first, lr=0.05, momentum=0.9), AdamW(others, lr=5e-3)])


def clipped(model: Any, rank: int) -> list[Any]:
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return steps(model, rank, [optimizer], lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def accumulated(model: Any, rank: int) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        with model.no_sync():
            loss(model, rank, step, 0).backward()
        loss(model, rank, step, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [optimizer]


def scaled(model: Any, rank: int) -> list[Any]:
    optimizer, scaler = AdamW(model.parameters(), lr=5e-3), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(STEPS):
        # The first step is skipped, so the optimizer is found at the second; a later one is skipped, too.
        broken = rank == 1 and step in (0, 5)
        scaler.scale(loss(model, rank, step) * (float("inf") if broken else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**6, "two steps were to be skipped"
    return [optimizer]


LOOPS: list[Loop] = [sgd, adamw, scheduled, two_optimizers, clipped, accumulated, scaled]


def every_loop(rank: int, world: int) -> dict[str, str]:
    problems = {}
    for loop in LOOPS:
        seen = []
        for kind in (TorchDdp, syncline.DistributedDataParallel):
            torch.manual_seed(5)
            model = kind(net())
            optimizers = loop(model, rank)
            ours = kind is syncline.DistributedDataParallel
            adopted = ["add_param_group" in vars(optimizer) for optimizer in optimizers]
            assert adopted == [ours] * len(optimizers), loop.__name__
            if ours:
                assert model.sync.step == (STEPS - 2 if loop is scaled else STEPS), (loop.__name__, model.sync.step)
            kept = [value for o in optimizers for s in o.state_dict()["state"].values() for value in s.values()]
            # Other ranks have statistics of their own after their last forward.
            own = model.state_dict() if rank == 0 else dict(model.named_parameters())
            seen.append({**{k: t.detach().clone() for k, t in own.items()}, **dict(enumerate(kept))})
            if ours:
                model.close()
        assert list(seen[0]) == list(seen[1]), loop.__name__
        for key, tensor in seen[0].items():
            if not torch.equal(torch.as_tensor(tensor), torch.as_tensor(seen[1][key])):
                problems[f"{loop.__name__}: {key}"] = f"{tensor} and {seen[1][key]}"
    return problems


@pytest.mark.full
def test_training_loops_match_torch_ddp_bit_for_bit() -> None:
    assert run_ranks(every_loop, 2, timeout=100) == [{}, {}]


def shape(rank: int, world: int) -> None:
    """What the wrapper is beside the loop."""
    model = net()
    torch_keys = list(TorchDdp(model).state_dict())
    wrapped = syncline.DistributedDataParallel(model, None, None, 0, True, bucket_cap_mb=4, static_graph=True)
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == torch_keys
    assert all(name.startswith("module.") for name, _ in wrapped.named_parameters())
    with pytest.raises(UsageError, match="same number of batches"):
        wrapped.join()
    with pytest.raises(UsageError, match="compress="):
        wrapped.register_comm_hook(None, None)

    # Hooks of the user's are called once a step, whoever steps.
    optimizer, calls = SGD(model.parameters(), lr=0.05), []
    hooks = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: calls.append(("before", args == (o,)))),
        register_optimizer_step_post_hook(lambda *_: calls.append(("after", True))),
        optimizer.register_step_pre_hook(lambda *_: calls.append(("own", True))),
    ]
    steps(wrapped, rank, [optimizer])
    assert calls == [("before", True), ("own", True), ("after", True)] * STEPS
    for hook in hooks:
        hook.remove()

    # An optimizer of somebody else's is left alone.
    other = nn.Linear(2, 2)
    stranger = SGD(other.parameters(), lr=0.1)
    other(torch.ones(2)).sum().backward()
    stranger.step()
    assert "step" not in vars(stranger)

    # A copy is a plain module with the same values.
    twin = copy.deepcopy(wrapped)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), wrapped.parameters(), strict=True))
    with pytest.raises(UsageError, match="copy"):
        _ = twin.sync
    with twin.no_sync():
        loss(twin, rank, 0).backward()

    second = syncline.DistributedDataParallel(nn.Linear(16, 4))

    # Garbage is closed: no thread is left, and the model is as it was.
    sync = wrapped.sync
    del wrapped
    second.close()
    gc.collect()
    assert sync.closed
    assert "step" not in optimizer.__dict__
    assert not [t.name for t in threading.enumerate() if t.name.startswith("syncline-")]
    dist.barrier()


def test_interface_hooks_copies_and_garbage_collection() -> None:
    run_ranks(shape, 2, timeout=60)


def codec_and_given_optimizer(rank: int, world: int) -> tuple[bool, bool]:
    """A codec through the wrapper is the codec through attach; an optimizer that is given is adopted at once."""
    seen = []
    for wrap in (True, False):
        torch.manual_seed(1)
        model = net()
        optimizer = SGD(model.parameters(), lr=0.05)
        if wrap:
            wrapped = syncline.DistributedDataParallel(model, compress="powersgd(rank=2)", optimizer=optimizer)
            assert "add_param_group" in vars(optimizer)
            sync, trained = wrapped.sync, wrapped
        else:
            sync, trained = syncline.attach(model, optimizer, compress="powersgd(rank=2)"), model
        steps(trained, rank, [optimizer])
        seen.append({**{k: p.detach().clone() for k, p in model.named_parameters()}, **sync.state_dict()})
        sync.close()
    return list(seen[0]) == list(seen[1]), all(torch.equal(t, seen[1][k]) for k, t in seen[0].items())


def test_a_codec_gives_the_same_as_with_attach() -> None:
    assert run_ranks(codec_and_given_optimizer, 2) == [(True, True)] * 2


def one_rank(rank: int, world: int) -> None:
    model = syncline.DistributedDataParallel(net(), device_ids=[0])
    steps(model, rank, [SGD(model.parameters(), lr=0.05)])
    model.close()
    for refused in ({"device_ids": [0, 1]}, {"mixed_precision": object()}, {"param_to_hook_all_reduce": object()}):
        with pytest.raises(UsageError):
            syncline.DistributedDataParallel(net(), **refused)


def test_one_rank_and_refused_options() -> None:
    run_ranks(one_rank, 1)
