"""Hugging Face Accelerate with Syncline: `prepare` in place of `accelerator.prepare`.

Run it with `accelerate launch`, torchrun, or on emulated nodes:
`syncline cluster --nodes 2 --bandwidth 200Mbit -- python examples/accelerate_loop.py`.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncline.integrations.accelerate import prepare, sync_of


def main() -> None:
    """Train, save the state with that of the codec, and print the last loss on the main process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", default="auto", help="a codec, such as 'powersgd(rank=4)'")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", help="a folder for the state")
    given = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2 * 32 * given.steps * accelerator.num_processes, 64)
    loader = DataLoader(TensorDataset(x, x[:, :8].sin()), batch_size=32)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compress=given.compress)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if given.save:
        accelerator.save_state(given.save)
    accelerator.print(f"loss {loss.item():.4f}")
    if accelerator.num_processes > 1:
        sync_of(accelerator, model).close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
