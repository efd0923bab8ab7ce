"""A loop of transformers' Trainer on real ranks, with rank 1 late; `python tests/trace/trainer_ranks.py` records it."""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from syncline.trace import recording

LATE_S, STEPS, BATCH = 0.08, 12, 16


class Late(nn.Module):
    """A model with BatchNorm whose forward pass takes longer on rank 1; `fired` counts that."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
        self.fired = 0

    def forward(self, x, labels):
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
            self.fired += 1
        scores = self.layers(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def train(rank, world, folder):
    """Train with the Trainer; the recorder is told nothing. Returns how often this rank was late."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # asked for, but the group exists already
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = Late()
    data = [{"x": torch.randn(8), "labels": number % 2} for number in range(BATCH * world * STEPS)]
    arguments = TrainingArguments(
        output_dir=str(Path(folder, "trainer")),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    with recording(path=Path(folder, "trace.json.gz"), every=1):
        Trainer(model=model, args=arguments, train_dataset=data).train()
    return model.fired


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        print(run_ranks(train, 2, folder))
        shutil.copy(Path(folder, "trace.json.gz"), Path(__file__).parent / "fixtures" / "trainer.json.gz")
