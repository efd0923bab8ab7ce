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
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    extract_model_from_parallel,
)
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
            lambda: [(m, partial(h.state_dict, m), partial(h.load_state_dict, m)) for m, h in self.models],
        )


_syncs: "WeakKeyDictionary[Accelerator, list[ReferenceType[Sync]]]" = WeakKeyDictionary()
"""The engines of each accelerator, in order. A model keeps its engine alive."""


def prepare(accelerator: Accelerator, *objects: Any, compress: str | None = None, **options: Any) -> Any:
    """`accelerator.prepare` with Syncline's engine in place of DDP; returns the same objects in the same order.

        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, compress="auto")

    Accumulation (`accelerator.accumulate`), clipping, mixed precision, `torch.compile` and checkpoints
    (`accelerator.save_state`) work as they do with DDP. `sync_of(accelerator, model)` is the engine. A model that is
    prepared a second time gets a new engine.

    Args:
        accelerator: The accelerator.
        objects: One model, its optimizer or optimizers, and whatever else `accelerator.prepare` takes.
        compress: As in `attach`.
        options: The other options of `attach`. `buffers` is `broadcast_buffers` of the accelerator's DDP arguments.
    """
    models = [at for at, thing in enumerate(objects) if isinstance(thing, nn.Module)]
    if len(models) != 1:
        raise UsageError(f"prepare got {len(models)} models: call it once for each model, with its own optimizer")
    options = _ddp_options(accelerator) | options
    optimizers = [
        thing.optimizer if isinstance(thing, AcceleratedOptimizer) else thing
        for thing in objects
        if isinstance(thing, torch.optim.Optimizer)
    ]
    done = list(objects)
    # In evaluation mode Accelerate moves the model, sets autocast and compiles, and does not wrap it.
    done[models[0]] = model = accelerator.prepare_model(objects[models[0]], evaluation_mode=True)
    others = [at for at in range(len(objects)) if at not in models]
    prepared = accelerator.prepare(*(objects[at] for at in others)) if others else ()
    for at, thing in zip(others, prepared if len(others) > 1 else (prepared,), strict=False):
        done[at] = thing
    if accelerator.num_processes > 1:
        for known in [*_syncs]:
            for sync in engines(known):
                if _is_model_of(sync, model):
                    sync.close()
        _engage(accelerator, attach(model, optimizers or None, compress=compress, **options))
    return done[0] if len(done) == 1 else tuple(done)


def sync_of(accelerator: Accelerator, model: nn.Module) -> Sync:
    """The engine of a model that `prepare` returned."""
    for sync in engines(accelerator):
        if _is_model_of(sync, model):
            return sync
    raise UsageError("this accelerator has no engine for this model: call prepare(accelerator, model, ...) first")


def use_in(accelerator: Accelerator, *, compress: str | None = None, **options: Any) -> None:
    """Make `accelerator.prepare(model, optimizer, ...)` do what `prepare` here does; for frameworks that call it."""
    original = accelerator.prepare
    _ddp_options(accelerator)

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
    """The open engines of the models that were prepared and still exist, in order."""
    alive = [reference() for reference in _syncs.get(accelerator, ())]
    return [sync for sync in alive if sync is not None and not sync.closed]


def _ddp_options(accelerator: Accelerator) -> dict[str, Any]:
    """What the accelerator's arguments for DDP mean for `attach`; an error where the engine cannot take DDP's place."""
    kind, layout = accelerator.distributed_type, accelerator.parallelism_config
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU) or (
        layout is not None and layout.total_size != layout.dp_replicate_size
    ):
        raise UsageError(
            f"Syncline's engine takes the place of DDP, and this accelerator uses {kind.value} or a parallelism_config:"
            " use syncline.fsdp.attach for FSDP2"
        )
    handler = accelerator.ddp_handler
    if handler is None:
        return {}
    if issubclass(type(handler), SynclineKwargs):
        raise UsageError("SynclineKwargs is for DDP: leave it out, and give compress= to prepare")
    if handler.comm_hook not in (DDPCommunicationHookType.NO, None):
        raise UsageError(
            f"DDP's comm_hook {handler.comm_hook} has no place here: leave it out, and name a codec: compress='bf16'"
        )
    return {"buffers": handler.broadcast_buffers is not False}


def _is_model_of(sync: Sync, model: nn.Module) -> bool:
    """Whether this is the engine's model, or the same one compiled or not compiled."""
    return sync.model is model or _plain(sync.model) is _plain(model)


def _plain(model: nn.Module) -> nn.Module:
    """The model without DDP and `torch.compile` around it."""
    plain: nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
    return plain


def _engage(accelerator: Accelerator, sync: Sync) -> None:
    first = accelerator not in _syncs
    _syncs.setdefault(accelerator, []).append(ref(sync))
    if not first:
        return

    def switch(original: Any, *, off: bool) -> Any:
        @contextmanager
        def switched(model: nn.Module) -> Iterator[None]:
            known = [sync for sync in engines(accelerator) if _is_model_of(sync, model)]
            context: AbstractContextManager[Any] = known[0].no_sync(enabled=off) if known else original(model)
            with context:
                yield

        return switched

    accelerator.no_sync = switch(accelerator.no_sync, off=True)
    accelerator.trigger_sync_in_backward = switch(accelerator.trigger_sync_in_backward, off=False)
    _with_checkpoints(
        accelerator, lambda: [(sync.model, sync.state_dict, sync.load_state_dict) for sync in engines(accelerator)]
    )


Stateful = tuple[nn.Module, Callable[[], Mapping[str, Tensor]], Callable[[Mapping[str, Tensor]], None]]
"""A model, how to get its codec state, and how to load it."""


def _with_checkpoints(accelerator: Accelerator, stateful: Callable[[], list[Stateful]]) -> None:
    """Write and read the codec state of this rank with the accelerator's state, for the models that it still has."""
    place = {"rank": accelerator.process_index, "world": accelerator.num_processes}

    def known(models: list[nn.Module]) -> list[Stateful]:
        mine = {id(_plain(model)) for model in models}
        return [row for row in stateful() if id(_plain(row[0])) in mine]

    def on_save(models: list[nn.Module], weights: Any, folder: str) -> None:
        for number, (_, state_of, _load) in enumerate(known(models)):
            save_rank_state(state_of(), Path(folder), model=number, **place)

    def on_load(models: list[nn.Module], folder: str) -> None:
        for number, (_, _state_of, load) in enumerate(known(models)):
            load(load_rank_state(Path(folder), model=number, **place))

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
