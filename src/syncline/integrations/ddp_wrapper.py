"""`DistributedDataParallel` in torch's shape: the model is wrapped, and optimizers are found when they step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from syncline._compat import on_every_step
from syncline.engine.attach import attach
from syncline.engine.shutdown import close_when_gone
from syncline.engine.sync import Sync
from syncline.errors import UsageError
from syncline.plan import Plan


class DistributedDataParallel(nn.Module):
    """Wrap a model as `torch.nn.parallel.DistributedDataParallel` does; the loop stays as it is.

    An optimizer that steps the model's parameters is found at its first step, which is a plain one after all gradients
    have arrived; from the next on it steps by units, as with `attach`. `sync` is the engine: its `state_dict` holds
    what codecs keep. Deleting the wrapper closes it; `close()` does so at a moment of your choice.

    device_ids, output_device: one device or none; the model stays where it is and inputs are not moved.
    broadcast_buffers, forward_sync_buffers: rank 0's buffers for all, sent after every backward pass.
    process_group, device_mesh: who takes part; one of the two.
    dim, init_sync, bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters, check_reduction, gradient_as_bucket_view,
    static_graph, skip_all_reduce_unused_params, batched_grad_copy: taken and ignored. There are no buckets (a plan says
    what travels together), unused parameters are always found, and replicas always start as rank 0's.
    compress, plan, exchange and the other options: as in `attach`.
    optimizer: one or several, to step by units from the first step on.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        compress: str | None = None,
        plan: Plan | str | Path | None = None,
        exchange: str | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) > 1:
            raise UsageError(f"device_ids has {len(device_ids)} devices: start one process a device, each with its own")
        if mixed_precision is not None:
            raise UsageError("mixed_precision is not supported: use torch.autocast, or compress='bf16' for the wire")
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise UsageError("delay_all_reduce_named_params is not supported: a plan's order says what is sent last")
        if getattr(module, "_ddp_params_and_buffers_to_ignore", None):
            raise UsageError("DDP's list of ignored parameters is not supported: call requires_grad_(False) on them")
        if process_group is not None and device_mesh is not None:
            raise UsageError("process_group and device_mesh are both given: give one of them")
        self.module = module
        buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        sync = attach(
            module,
            optimizer,
            compress=compress,
            plan=plan,
            exchange=exchange,
            process_group=process_group if device_mesh is None else device_mesh,
            buffers=buffers is not False,
            **options,
        )
        self._engine: _Engine | None = _Engine(sync)
        self._finalizer: Any = close_when_gone(self, self._engine.let_go)
        self._finalizer.atexit = False  # the engine sees to that itself

    @property
    def sync(self) -> Sync:
        """The engine: `wait`, `state_dict` of the codecs, `replan`."""
        if self._engine is None:
            raise UsageError("this is a copy of a wrapped model, which exchanges nothing: wrap copy.module by itself")
        return self._engine.sync

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally: backward passes in this context exchange nothing."""
        return nullcontext() if self._engine is None else self._engine.sync.no_sync()

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: every rank must run as many steps as the others."""
        raise UsageError("join() is not supported: give every rank the same number of batches (drop_last=True)")

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: a codec is named where the model is wrapped."""
        raise UsageError("there are no comm hooks here: name a codec, compress='powersgd(rank=4)', when wrapping")

    def close(self) -> None:
        """Finish what is in flight and end all threads; `module` is a plain model again."""
        if self._engine is not None:
            self._finalizer.detach()
            self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        # Copies (EMA, pickles) are plain modules: they have parameters of their own, which nobody exchanges.
        return {**self.__dict__, "_engine": None, "_finalizer": None}


class _Engine:
    """A `Sync` and the search for its optimizers; apart from the wrapper, which can so be collected."""

    def __init__(self, sync: Sync) -> None:
        self.sync = sync
        self._first: set[int] = set()
        self._forget = on_every_step(self._before, self._after) if sync.world > 1 else (lambda: None)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._first.discard(id(optimizer))
        if self.sync._stepper.found(optimizer):
            self._first.add(id(optimizer))

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._first:
            self._first.discard(id(optimizer))
            self.sync._stepper.stepped_whole(optimizer)

    def close(self) -> None:
        self._forget()
        self.sync.close()

    def let_go(self) -> None:
        """Close for the garbage collector, which comes to every rank at another time: no other engine may take these
        process groups over, for the ranks would not take the same."""
        sync = self.sync
        if sync.world > 1 and not sync._closed and sync.executor.failure is None:
            sync.wait()
            sync.groups.rounds, sync.groups.control = [], None
        self.close()
