"""`SynclineStrategy` for Lightning's Trainer and `SynclineFabricStrategy` for Fabric: our wrapper in place of DDP.

They work on CPUs, too, where Lightning does not use communication hooks. Each checkpoint gets a folder beside it,
`<checkpoint>.syncline`, with the codec state of every rank.
"""

import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from syncline.engine.sync import Sync
from syncline.errors import UsageError
from syncline.integrations.ddp_wrapper import DistributedDataParallel
from syncline.integrations.rank_files import load_rank_state, save_rank_state

_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class _WithEngine:
    """What the two strategies share: options, the wrapper, and codec state beside checkpoints."""

    _ddp_kwargs: dict[str, Any]
    """The arguments that a strategy of Lightning does not know, and passes on to DDP."""
    global_rank: int
    world_size: int

    def __init__(
        self, *, compress: str | None = None, sync_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if hooks := [name for name in _HOOKS if kwargs.get(name) is not None]:
            raise UsageError(f"{hooks[0]} is for torch's DDP: leave it out, and name a codec: compress='bf16'")
        super().__init__(**kwargs)
        self._compress, self._sync_options = compress, dict(sync_options or {})

    def _wrapped(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(module, compress=self._compress, **self._ddp_kwargs, **self._sync_options)

    def _save_codec_state(self, state: Mapping[str, Tensor], checkpoint: Any, *, model: int = 0) -> None:
        save_rank_state(state, _beside(checkpoint), rank=self.global_rank, world=self.world_size, model=model)

    def _load_codec_state(self, checkpoint: Any, *, model: int = 0) -> dict[str, Tensor] | None:
        """This rank's codec state. A checkpoint of a job without compression needs none."""
        if self._compress is None and not _beside(checkpoint).is_dir():
            return None
        return load_rank_state(_beside(checkpoint), rank=self.global_rank, world=self.world_size, model=model)


class SynclineStrategy(_WithEngine, DDPStrategy):
    """Lightning's DDP strategy with Syncline's engine: `Trainer(strategy=SynclineStrategy(compress="auto"))`.

    Args:
        compress: As in `attach`.
        sync_options: The other options of `attach`, as a dict.
        kwargs: The arguments of Lightning's `DDPStrategy`.
    """

    def __init__(
        self, *, compress: str | None = None, sync_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(compress=compress, sync_options=sync_options, **kwargs)
        self._loaded: dict[str, Tensor] | None = None
        """Codec state of a checkpoint that was loaded before the engine was made."""
        self._left: dict[str, Tensor] | None = None
        """Codec state of the last `fit`, for a checkpoint that is saved after it."""

    @property
    def sync(self) -> Sync:
        """The engine, once `fit` has begun."""
        assert isinstance(self.model, DistributedDataParallel), "the engine exists while the model is fitted"
        return self.model.sync

    def _setup_model(self, model: nn.Module) -> Any:
        wrapped = self._wrapped(model)
        if self._loaded is not None:
            wrapped.sync.load_state_dict(self._loaded)
        self._loaded = self._left = None
        return wrapped

    def _register_ddp_hooks(self) -> None:
        """Nothing to do: the codec is the engine's."""

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally."""
        return self.sync.no_sync()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the checkpoint, and the codec state of every rank beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        fitting = isinstance(self.model, DistributedDataParallel)
        state = self.sync.state_dict() if fitting else self._left
        if state is not None:
            self._save_codec_state(state, filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint and, if training goes on from it, this rank's codec state."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module = self.lightning_module
        if module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        state = self._load_codec_state(checkpoint_path)
        if isinstance(self.model, DistributedDataParallel):
            if state is not None:
                self.sync.load_state_dict(state)
        else:
            self._loaded = state
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
            if sys.exc_info()[1] is None:  # else gradients may be missing, and there is nothing to wait for
                self._left = {name: tensor.cpu() for name, tensor in wrapped.sync.state_dict().items()}
            self.model = wrapped.module
            wrapped.close()
        super().teardown()


class SynclineFabricStrategy(_WithEngine, FabricDDPStrategy):
    """Fabric's DDP strategy with Syncline's engine: `Fabric(strategy=SynclineFabricStrategy(compress="auto"))`.

    `fabric.no_backward_sync(model)` accumulates. `fabric.save` and `fabric.load` include the codec state of the models
    that are in the state which you save. `fabric.strategy.sync_of(model)` is the engine.

    Args:
        compress: As in `attach`.
        sync_options: The other options of `attach`, as a dict.
        kwargs: The arguments of Fabric's `DDPStrategy`.
    """

    def __init__(
        self, *, compress: str | None = None, sync_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(compress=compress, sync_options=sync_options, **kwargs)
        self._backward_sync_control = _NoSync()
        self._models: WeakSet[DistributedDataParallel] = WeakSet()

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap the model with the engine."""
        wrapped = self._wrapped(module)
        self._models.add(wrapped)
        return wrapped

    def sync_of(self, model: nn.Module) -> Sync:
        """The engine of a model that `fabric.setup` returned: `fabric.strategy.sync_of(model)`."""
        for wrapped in self._models:
            if wrapped.module in (model, getattr(model, "module", None)):
                return wrapped.sync
        raise UsageError("this strategy has no engine for this model: call fabric.setup(model, optimizer) first")

    def get_module_state_dict(self, module: nn.Module) -> Mapping[str, Any]:
        """The state of the model without the wrapper."""
        return _unwrapped(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of the model without the wrapper."""
        _unwrapped(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the checkpoint, and the codec state of every rank beside it."""
        super().save_checkpoint(path, state, *args, **kwargs)
        for number, wrapped in enumerate(_engines_in(state)):
            self._save_codec_state(wrapped.sync.state_dict(), self.broadcast(path), model=number)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint, and this rank's codec state."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        for number, wrapped in enumerate(_engines_in(state)):
            if (codec_state := self._load_codec_state(path, model=number)) is not None:
                wrapped.sync.load_state_dict(codec_state)
        return rest


class _NoSync:
    """Fabric's switch for accumulation."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise UsageError("no_backward_sync needs a model that fabric.setup has wrapped")
        return module.no_sync()


def _engines_in(state: Any) -> list[DistributedDataParallel]:
    """The wrapped models among the values of a checkpoint's state, in order."""
    values = state.values() if isinstance(state, Mapping) else (state,)
    return [value for value in values if isinstance(value, DistributedDataParallel)]


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _beside(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}.syncline")
