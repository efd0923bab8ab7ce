"""Hugging Face Accelerate: `SynclineKwargs` (a codec in torch's DDP) and `prepare` (the engine in place of DDP).

Both write the codec state of every rank into the folders of `accelerator.save_state` and read it in
`accelerator.load_state`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from syncline.engine.attach import attach
from syncline.engine.sync import Sync
from syncline.errors import UsageError
from syncline.integrations.ddp_hook import HookState, ddp_hook
from syncline.integrations.rank_files import load_rank_state, save_rank_state


@dataclass
class SynclineKwargs(DistributedDataParallelKwargs):
    """Send the gradients of a model that Accelerate wraps in DDP with one of our codecs.

        accelerator = Accelerator(kwargs_handlers=[SynclineKwargs(compress="powersgd(rank=4)")])

    The other fields are those of `DistributedDataParallelKwargs`. Residuals are saved and loaded with the accelerator's
    state if you call `keep_state(accelerator)` after `prepare`.

    Args:
        compress: A codec spec; `"none"` is plain DDP.
        exchange: The communication pattern, such as `"ring"`. None: the codec's default.
        seed: Seed of codecs that draw random numbers; the same on all ranks.
    """

    compress: str = "none"
    exchange: str | None = None
    seed: int = 0
    models: list[tuple[Any, HookState]] = field(default_factory=list, repr=False)
    """The DDP models with this codec, and the state of their hooks."""

    # Accelerate looks handlers up by their exact class, and would not know a subclass.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return DistributedDataParallelKwargs

    def to_dict(self, ignore_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """The arguments of torch's DDP."""
        ours = ("compress", "exchange", "seed", "models")
        named = {name: value for name, value in vars(self).items() if name not in ours}
        return DistributedDataParallelKwargs(**named).to_dict()  # type: ignore[no-any-return]

    def register_comm_hook(self, model: Any) -> None:
        """Accelerate calls this with the model that it has wrapped in DDP."""
        state, hook = ddp_hook(self.compress, exchange=self.exchange, seed=self.seed)
        model.register_comm_hook(state, hook)
        self.models.append((model, state))

    def keep_state(self, accelerator: Accelerator) -> None:
        """Save and load the codec state with the accelerator's state."""
        _with_checkpoints(
            accelerator,
            lambda: [(partial(h.state_dict, m), partial(h.load_state_dict, m)) for m, h in self.models],
        )


_syncs: "WeakKeyDictionary[Accelerator, list[tuple[nn.Module, Sync]]]" = WeakKeyDictionary()


def prepare(accelerator: Accelerator, *objects: Any, compress: str | None = None, **options: Any) -> Any:
    """`accelerator.prepare` with Syncline's engine in place of DDP; returns the same objects in the same order.

        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compress="auto")

    Accumulation (`accelerator.accumulate`), clipping, mixed precision, `torch.compile` and checkpoints
    (`accelerator.save_state`) work as they do with DDP. `sync_of(accelerator, model)` is the engine.

    Args:
        accelerator: The accelerator.
        objects: One model, its optimizer or optimizers, and whatever else `accelerator.prepare` takes.
        compress: As in `attach`.
        options: The other options of `attach`.
    """
    models = [at for at, thing in enumerate(objects) if isinstance(thing, nn.Module)]
    if len(models) != 1:
        raise UsageError(f"prepare got {len(models)} models: call it once for each model, with its own optimizer")
    optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    done = list(objects)
    # In evaluation mode Accelerate moves the model, sets autocast and compiles, and does not wrap it.
    done[models[0]] = model = accelerator.prepare_model(objects[models[0]], evaluation_mode=True)
    others = [at for at in range(len(objects)) if at not in models]
    prepared = accelerator.prepare(*(objects[at] for at in others)) if others else ()
    for at, thing in zip(others, prepared if len(others) > 1 else (prepared,), strict=False):
        done[at] = thing
    if accelerator.num_processes > 1:
        _engage(accelerator, model, attach(model, optimizers or None, compress=compress, **options))
    return done[0] if len(done) == 1 else tuple(done)


def sync_of(accelerator: Accelerator, model: nn.Module) -> Sync:
    """The engine of a model that `prepare` returned."""
    for known, sync in _syncs.get(accelerator, ()):
        if known is model:
            return sync
    raise UsageError("this accelerator has no engine for this model: call prepare(accelerator, model, ...) first")


def use_in(accelerator: Accelerator, *, compress: str | None = None, **options: Any) -> None:
    """Make `accelerator.prepare(model, optimizer, ...)` do what `prepare` here does; for frameworks that call it."""
    original = accelerator.prepare

    def ours(*objects: Any, **keywords: Any) -> Any:
        trains = any(isinstance(thing, torch.optim.Optimizer) for thing in objects)
        if not trains or not any(isinstance(thing, nn.Module) for thing in objects):
            return original(*objects, **keywords)
        accelerator.prepare = original
        try:
            return prepare(accelerator, *objects, compress=compress, **options)
        finally:
            accelerator.prepare = ours

    accelerator.prepare = ours


def engines(accelerator: Accelerator) -> list[Sync]:
    """The engines of all models that were prepared, in order."""
    return [sync for _, sync in _syncs.get(accelerator, ())]


def _engage(accelerator: Accelerator, model: nn.Module, sync: Sync) -> None:
    first = accelerator not in _syncs
    _syncs.setdefault(accelerator, []).append((model, sync))
    if not first:
        return
    original = accelerator.no_sync

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        known = [sync for candidate, sync in _syncs[accelerator] if candidate is model]
        context: AbstractContextManager[Any] = known[0].no_sync() if known else original(model)
        with context:
            yield

    accelerator.no_sync = no_sync
    _with_checkpoints(accelerator, lambda: [(sync.state_dict, sync.load_state_dict) for sync in engines(accelerator)])


Stateful = tuple[Callable[[], Mapping[str, Tensor]], Callable[[Mapping[str, Tensor]], None]]
"""How to get the codec state of a model, and how to load it."""


def _with_checkpoints(accelerator: Accelerator, models: Callable[[], list[Stateful]]) -> None:
    """Write and read the codec state of this rank with the accelerator's state."""
    place = {"rank": accelerator.process_index, "world": accelerator.num_processes}

    def on_save(_: Any, weights: Any, folder: str) -> None:
        for number, (state_of, _load) in enumerate(models()):
            save_rank_state(state_of(), Path(folder), model=number, **place)

    def on_load(_: Any, folder: str) -> None:
        for number, (_state_of, load) in enumerate(models()):
            load(load_rank_state(Path(folder), model=number, **place))

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
