"""`SynclineStrategy` for Lightning's Trainer and `SynclineFabricStrategy` for Fabric: our wrapper in place of DDP.

It works on CPUs, too, where Lightning does not use communication hooks.
"""

import inspect
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from syncline.engine.sync import Sync
from syncline.integrations.ddp_wrapper import DistributedDataParallel
from syncline.integrations.rank_files import load_rank_state, save_rank_state


class SynclineStrategy(DDPStrategy):
    """Lightning's DDP strategy with Syncline's engine: `Trainer(strategy=SynclineStrategy(compress="auto"))`.

    Checkpoints get a folder beside them, `<checkpoint>.syncline`, with the codec state of every rank.

    Args:
        compress: As in `attach`.
        sync_options: The other options of `attach`, as a dict.
        kwargs: The arguments of Lightning's `DDPStrategy`.
    """

    def __init__(
        self, *, compress: str | None = None, sync_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._compress, self._sync_options = compress, {**_of_the_wrapper(kwargs, DDPStrategy), **(sync_options or {})}
        self._saved: dict[str, Tensor] | None = None
        """Codec state of a checkpoint that was loaded before the engine was made."""

    @property
    def sync(self) -> Sync:
        """The engine, once `fit` has begun."""
        assert isinstance(self.model, DistributedDataParallel), "the engine exists while the model is fitted"
        return self.model.sync

    def _setup_model(self, model: nn.Module) -> Any:
        wrapped = DistributedDataParallel(model, compress=self._compress, **self._sync_options)
        if self._saved is not None:
            wrapped.sync.load_state_dict(self._saved)
            self._saved = None
        return wrapped

    def _register_ddp_hooks(self) -> None:
        """Nothing to do: the codec is the engine's."""

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally."""
        return self.sync.no_sync()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the checkpoint, and the codec state of every rank beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if isinstance(self.model, DistributedDataParallel):
            save_rank_state(self.sync.state_dict(), _beside(filepath), rank=self.global_rank, world=self.world_size)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint, and this rank's codec state."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if _beside(checkpoint_path).is_dir():
            saved = load_rank_state(_beside(checkpoint_path), rank=self.global_rank, world=self.world_size)
            if isinstance(self.model, DistributedDataParallel):
                self.sync.load_state_dict(saved)
            else:
                self._saved = saved
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with its codec state."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def teardown(self) -> None:
        """Finish what is in flight and close the engine."""
        wrapped: Any = getattr(self, "model", None)
        if isinstance(wrapped, DistributedDataParallel):
            self.model = wrapped.module
            wrapped.close()
        super().teardown()


class SynclineFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP strategy with Syncline's engine: `Fabric(strategy=SynclineFabricStrategy(compress="auto"))`.

    `fabric.no_backward_sync(model)` accumulates. Save `model.sync.state_dict()` on every rank beside your checkpoints.

    Args:
        compress: As in `attach`.
        sync_options: The other options of `attach`, as a dict.
        kwargs: The arguments of Fabric's `DDPStrategy`.
    """

    def __init__(
        self, *, compress: str | None = None, sync_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._compress, self._sync_options = (
            compress,
            {**_of_the_wrapper(kwargs, FabricDDPStrategy), **(sync_options or {})},
        )
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap the model with the engine."""
        return DistributedDataParallel(module, compress=self._compress, **self._sync_options)

    def get_module_state_dict(self, module: nn.Module) -> Mapping[str, Any]:
        """The state of the model without the wrapper."""
        return _unwrapped(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of the model without the wrapper."""
        _unwrapped(module).load_state_dict(state_dict, strict=strict)


class _NoSync:
    """Fabric's switch for accumulation."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


def _of_the_wrapper(kwargs: dict[str, Any], strategy: Any) -> dict[str, Any]:
    """The arguments that Lightning's strategy does not know and passes on to DDP."""
    known = inspect.signature(strategy.__init__).parameters
    return {name: value for name, value in kwargs.items() if name not in known}


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _beside(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}.syncline")
