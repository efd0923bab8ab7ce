"""Hugging Face's Trainer on real ranks: `SynclineTrainer` equals the Trainer with DDP, and resumes bit for bit."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ranks import run_ranks, run_until_killed
from syncline.integrations.trainer import SynclineTrainer

STEPS = 20


class Text(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random start: a model learns them."""

    def __init__(self) -> None:
        starts = torch.randint(0, 64, (4 * 2 * 2 * STEPS,), generator=torch.Generator().manual_seed(0))
        self.rows = (starts[:, None] + torch.arange(16)) % 64

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=4, max_steps=STEPS,
        gradient_accumulation_steps=2, max_grad_norm=0.5, bf16=True, logging_steps=1, learning_rate=1e-3, seed=3,
        report_to="none", disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, **more,
    )  # fmt: skip


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def weights(trainer: Trainer) -> list[Any]:
    assert trainer.model is not None
    return [p.detach().tolist() for p in trainer.model.parameters()]


def environment(rank: int, world: int) -> None:
    """What torchrun sets."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")


def compressed(args: TrainingArguments) -> SynclineTrainer:
    return SynclineTrainer(model=model(), args=args, train_dataset=Text(), compress="powersgd(rank=4)")


def straight(rank: int, world: int, folder: str) -> None:
    """Dense with DDP and with the engine; then PowerSGD with a checkpoint after eight steps."""
    environment(rank, world)
    base, results = Path(folder), {}
    for name, kind in (("ddp", Trainer), ("syncline", SynclineTrainer)):
        trainer = kind(model=model(), args=arguments(base / name), train_dataset=Text())
        assert trainer.args.world_size == 2
        trainer.train()
        results[name] = (losses(trainer), weights(trainer))
        for sync in getattr(trainer, "syncs", ()):
            sync.close()
    kept = arguments(base / "kept")
    kept.save_strategy, kept.save_steps = "steps", 8  # type: ignore[assignment]
    trainer = compressed(kept)
    trainer.train()
    results["powersgd"] = (losses(trainer), weights(trainer))
    torch.save(results, base / f"straight-{rank}.pt")


def resumed(rank: int, world: int, folder: str) -> tuple[list[float], list[Any]]:
    environment(rank, world)
    trainer = compressed(arguments(Path(folder) / "again"))
    trainer.train(resume_from_checkpoint=str(Path(folder) / "kept" / "checkpoint-8"))
    return losses(trainer), weights(trainer)


def test_the_trainer_with_the_engine_equals_the_trainer_with_ddp_and_resumes_after_a_kill(tmp_path: Path) -> None:
    run_until_killed(straight, 2, str(tmp_path), timeout=120)
    for rank, again in enumerate(run_ranks(resumed, 2, str(tmp_path), timeout=120)):
        result = torch.load(tmp_path / f"straight-{rank}.pt", weights_only=True)
        assert result["syncline"][1] == result["ddp"][1]
        assert result["syncline"][0] == result["ddp"][0]
        if rank == 0:  # the Trainer logs there
            assert len(result["ddp"][0]) == STEPS
            assert result["powersgd"][0][-1] < result["powersgd"][0][0] - 0.1, "it learns"
            assert again[0][8:] == result["powersgd"][0][8:]
        assert again[1] == result["powersgd"][1]
    assert len(list((tmp_path / "kept" / "checkpoint-8").glob("syncline-model0-rank*-of-2.pt"))) == 2
