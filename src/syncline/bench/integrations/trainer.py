"""The Trainer of transformers on two ranks, its DDP against `compress="auto"`, GPT-2 and BERT; one rank's part."""

import os
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.bench.timing import Clock
from syncline.cluster.ranks import Place, Report
from syncline.plan.cache import VARIABLE

DDP, AUTO = "Trainer", "SynclineTrainer(auto)"
MODELS = ("gpt2", "bert")
_WORDS, _LENGTH = 2000, 32


@dataclass(frozen=True)
class Options:
    """What is fine-tuned on each network; every round runs each way for `steps` steps, with a seed of its own."""

    models: tuple[str, ...] = MODELS
    rounds: int = 2
    steps: int = 40
    batch: int = 4
    """Sequences of a rank in a step."""
    width: int = 192
    layers: int = 4
    threads: int = 1


def rank_main(place: Place, options: Options, report: Report) -> dict[str, Any]:
    """Train all models in all ways; returns milliseconds of each step and losses, by model, way and round."""
    os.environ.update(LOCAL_RANK=str(place.local_rank), LOCAL_WORLD_SIZE="1", RANK=str(place.rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # Accelerate asks for them; the group exists
    os.environ[VARIABLE] = "off"  # each run finds its plan itself
    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        for model in options.models:
            rows[model] = {DDP: [], AUTO: []}
            for seed in range(options.rounds):
                for way in (DDP, AUTO) if seed % 2 == 0 else (AUTO, DDP):
                    rows[model][way].append(_run(model, way, options, seed=seed, folder=Path(folder)))
                report(f"{model}: round {seed + 1} of {options.rounds}")
    return rows


def _run(model: str, way: str, options: Options, *, seed: int, folder: Path) -> dict[str, list[float]]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from syncline.integrations.trainer import SynclineTrainer

    clock = Clock(torch.device("cpu"))
    marks = []

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(clock.mark())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append(clock.mark())

    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=options.batch,
        max_steps=options.steps, logging_steps=1, learning_rate=1e-3, lr_scheduler_type="constant", seed=seed,
        report_to="none", disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, log_level="error",
    )  # fmt: skip
    more: dict[str, Any] = {"compress": "auto"} if way == AUTO else {}
    trainer = (SynclineTrainer if way == AUTO else Trainer)(
        model=_model(model, options), args=arguments, train_dataset=_Text(model), callbacks=[Steps()], **more
    )
    trainer.train()
    for sync in getattr(trainer, "syncs", ()):
        sync.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"step_ms": [clock.between(a, b) for a, b in pairwise(marks)], "losses": losses}


def _model(name: str, options: Options) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": options.width, "n_layer": options.layers, "n_head": 4, "n_positions": _LENGTH}
        return GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    sizes = {"hidden_size": options.width, "num_hidden_layers": options.layers, "num_attention_heads": 4}
    more = {"intermediate_size": 4 * options.width, "max_position_embeddings": _LENGTH}
    return BertForSequenceClassification(BertConfig(vocab_size=_WORDS, num_labels=4, **sizes, **more))


class _Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random word; for BERT with a class that the first word decides."""

    def __init__(self, model: str) -> None:
        starts = torch.randint(0, _WORDS // 4, (4096,), generator=torch.Generator().manual_seed(0))
        self._rows, self._model = (starts[:, None] + torch.arange(_LENGTH)) % _WORDS, model

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
        return {"input_ids": row, "labels": row if self._model == "gpt2" else row[0] % 4}
