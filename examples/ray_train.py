"""Ray Train with Syncline: a `TorchTrainer` whose retries resume where a lost worker stopped, codec state included.

Run it on a Ray cluster: `ray start --head`, then `python examples/ray_train.py --workers 2 --storage /shared/run`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import Tensor, nn

import syncline
from syncline.integrations.ray import load_state, save_state


def network() -> nn.Module:
    """A small network, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The samples of one worker in one step."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :8].sin()


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs; after a failure Ray runs it again, with the last checkpoint."""
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(network(), parallel_strategy=None)  # on its device, without DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = syncline.attach(model, optimizer, compress=config["compress"])
    losses: list[float] = []
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            losses = saved["losses"]
            load_state(sync, folder)
    for step in range(len(losses), config["steps"]):
        x, y = batch(step, rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if (step + 1) % config["checkpoint_every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                save_state(sync, folder)  # every worker has residuals of its own
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
                    torch.save(state, Path(folder) / "state.pt")
                ray.train.report({"loss": losses[-1]}, checkpoint=ray.train.Checkpoint.from_directory(folder))
    sync.close()


def main() -> None:
    """Train on the cluster, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compress", default="powersgd(rank=4)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", type=Path, default=Path("ray-results"))
    given = parser.parse_args()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"compress": given.compress, "steps": given.steps, "checkpoint_every": 5},
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            name="syncline",
            storage_path=str(given.storage.absolute()),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
