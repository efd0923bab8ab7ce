"""Ray Train: codec state of every rank in Ray's checkpoints, `save_state` and `load_state`.

The engine itself needs nothing from here. In the training function of a `TorchTrainer`:

    model = ray.train.torch.prepare_model(model, parallel_strategy=None)
    sync = syncline.attach(model, optimizer, compress="auto")

`syncline compare --launcher ray` runs a comparison on a Ray cluster; see `syncline.train.session.ray`.
"""

from pathlib import Path

import ray.train

from syncline.engine.sync import Sync
from syncline.integrations.rank_files import load_rank_state, save_rank_state


def save_state(sync: Sync, folder: str | Path) -> None:
    """Write this rank's codec state into the folder of a checkpoint; call it on every rank.

        save_state(sync, folder)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    Every rank has to report its folder, not only rank 0: Ray merges them into one checkpoint.

    Args:
        sync: The engine, from `attach`.
        folder: The folder that this rank reports.
    """
    save_rank_state(sync.state_dict(), Path(folder), **_place())


def load_state(sync: Sync, folder: str | Path) -> None:
    """Continue with the codec state of a checkpoint, on every rank. Load model and optimizer first.

    With another number of ranks every one gets the mean of the residuals.

    Args:
        sync: The engine, from `attach`.
        folder: The folder of the checkpoint, as `ray.train.get_checkpoint().as_directory()` gives it.
    """
    sync.load_state_dict(load_rank_state(Path(folder), **_place()))


def _place() -> dict[str, int]:
    context = ray.train.get_context()
    return {"rank": context.get_world_rank(), "world": context.get_world_size()}
