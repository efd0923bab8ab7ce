"""`SynclineTrainer`: Hugging Face's Trainer with Syncline's engine in place of DDP."""

from pathlib import Path
from typing import Any

from transformers import Trainer

from syncline.integrations.accelerate import engines, use_in
from syncline.integrations.rank_files import load_rank_state, save_rank_state


class SynclineTrainer(Trainer):
    """`transformers.Trainer` whose gradients go through Syncline; everything else is the Trainer's.

        trainer = SynclineTrainer(model=model, args=args, train_dataset=data, compress="auto")

    Accumulation, clipping, mixed precision, `torch_compile`, checkpoints and `resume_from_checkpoint` work as before;
    checkpoints also hold the codec state of every rank. `trainer.syncs` are the engines.

    Args:
        args: The Trainer's own positional arguments.
        compress: As in `attach`.
        sync_options: The other options of `attach`, as a dict.
        kwargs: The Trainer's own keyword arguments.
    """

    def __init__(
        self, *args: Any, compress: str | None = None, sync_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._compress, self._sync_options = compress, dict(sync_options or {})
        super().__init__(*args, **kwargs)

    @property
    def syncs(self) -> list[Any]:
        """The engines, once training has begun."""
        return engines(self.accelerator)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and let it prepare models with the engine."""
        super().create_accelerator_and_postprocess()
        use_in(self.accelerator, compress=self._compress, **self._sync_options)

    # The Trainer saves and loads the random state of every rank here, which is when codec state goes in and out, too.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        for number, sync in enumerate(self.syncs):
            save_rank_state(sync.state_dict(), Path(output_dir), model=number, **self._place())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for number, sync in enumerate(self.syncs):
                sync.load_state_dict(load_rank_state(Path(checkpoint), model=number, **self._place()))

    def _place(self) -> dict[str, int]:
        return {"rank": self.args.process_index, "world": self.args.world_size}
