"""A program on a Ray cluster for test_ray.py: DDP against the engine, and a worker that is killed; writes JSON."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, prepare_model
from ray_train import batch, network, train_loop
from torch import nn
from torch.utils._pytree import tree_map

import syncline

STEPS, KILLED_AT = 20, 15
LOOP = {"compress": "powersgd(rank=4)", "steps": STEPS, "checkpoint_every": 5}


def losses_of(way: str) -> tuple[list[float], list[Any]]:
    """A loop with accumulation over two batches, clipping and bf16."""
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(network(), parallel_strategy="ddp" if way == "ddp" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = None if way == "ddp" else syncline.attach(model, optimizer)
    losses = []
    for step in range(STEPS):
        with model.no_sync() if sync is None else sync.no_sync():
            losses.append(backward(model, 2 * step, rank))
        losses.append(backward(model, 2 * step + 1, rank))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.tolist() for p in model.parameters()]
    if sync is not None:
        sync.close()
    return losses, weights


def backward(model: nn.Module, number: int, rank: int) -> float:
    x, y = batch(number, rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x), y)
    loss.backward()
    return float(loss.detach())


def loop(config: dict[str, Any]) -> None:
    """First attempt: both ways, the example undisturbed, and the example with a kill. Second attempt: the example."""
    torch.set_num_threads(1)
    base, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    (base / f"attempt-{os.getpid()}-{rank}").touch()
    report = ray.train.report
    if not (base / "fault").exists():
        where = {"node": ray.util.get_node_ip_address(), "world": torch.distributed.get_world_size()}
        same = losses_of("syncline") == losses_of("ddp")
        (base / f"compared{rank}.json").write_text(json.dumps({"same": same, **where}))

        def keep(metrics: dict[str, Any], *, checkpoint: Any) -> None:
            shutil.copytree(checkpoint.path, base / "straight", dirs_exist_ok=True)

        ray.train.report = keep
        train_loop(LOOP)
    reports: list[int] = []

    def report_or_die(*args: Any, **kwargs: Any) -> None:
        reports.append(1)
        if rank == 1 and len(reports) == KILLED_AT // 5 and not (base / "fault").exists():
            (base / "fault").write_text(f"{os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)
        report(*args, **kwargs)

    ray.train.report = report_or_die
    train_loop(LOOP)


def content(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, with the losses, as plain values."""
    values: dict[str, Any] = {}
    for path in sorted(folder.glob("*.pt")):
        values[path.name] = tree_map(
            lambda v: v.tolist() if isinstance(v, torch.Tensor) else v, torch.load(path, weights_only=True)
        )
    return values


if __name__ == "__main__":
    base = Path(sys.argv[1])
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": str(base)},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(base), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
    straight, fault = content(base / "straight"), base / "fault"
    with result.checkpoint.as_directory() as path:
        again = content(Path(path))
    losses = straight["state.pt"]["losses"]
    answer = {
        "compared": [json.loads((base / f"compared{rank}.json").read_text()) for rank in range(2)],
        "fault fired": fault.exists() and not Path("/proc", fault.read_text()).exists(),
        "attempts": len(list(base.glob("attempt-*-1"))),
        "steps": len(losses),
        "learned": losses[-1] < losses[0],
        "files": sorted(straight),
        "resumed equals straight": again == straight,
    }
    (base / "answer.json").write_text(json.dumps(answer))
