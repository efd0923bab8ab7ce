"""Lightning with Syncline: `SynclineStrategy` in place of `strategy="ddp"`.

Run it with torchrun: `torchrun --nproc-per-node 2 examples/lightning_fit.py`.
"""

import argparse

import lightning as L
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.integrations.lightning import SynclineStrategy


class Regression(L.LightningModule):
    """A small network that learns the sine of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
        self.last = 0.0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.last = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Fit, and print the last loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", default="auto", help="a codec, such as 'powersgd(rank=4)'")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    L.seed_everything(0, verbose=False)
    model = Regression()
    x = torch.randn(32 * given.steps * given.devices * given.nodes, 64)
    trainer = L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=given.devices,
        num_nodes=given.nodes,
        strategy=SynclineStrategy(compress=given.compress),
        plugins=[TorchElasticEnvironment()],
        max_steps=given.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x[:, :8].sin()), batch_size=32))
    if trainer.is_global_zero:
        print(f"loss {model.last:.4f}")


if __name__ == "__main__":
    main()
