"""Hugging Face's Trainer with Syncline: `SynclineTrainer` in place of `Trainer`, on a small GPT-2 from its config.

Run it with torchrun, or on emulated nodes:
`syncline cluster --nodes 2 --bandwidth 200Mbit -- python examples/trainer_finetune.py`.
"""

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from syncline.integrations.trainer import SynclineTrainer


class Counting(Dataset):
    """Sequences that count up from a random number."""

    def __init__(self) -> None:
        starts = torch.randint(0, 500, (4096,), generator=torch.Generator().manual_seed(0))
        self.rows = (starts[:, None] + torch.arange(32)) % 512

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Fine-tune, and print the last loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", default="auto", help="a codec, such as 'powersgd(rank=4)'")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="trainer-out")
    given = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() else "gloo",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, bos_token_id=0, eos_token_id=0, **sizes))
    trainer = SynclineTrainer(model=model, args=arguments, train_dataset=Counting(), compress=given.compress)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        print(f"loss {losses[-1]:.4f}")
    for sync in trainer.syncs:
        sync.close()


if __name__ == "__main__":
    main()
