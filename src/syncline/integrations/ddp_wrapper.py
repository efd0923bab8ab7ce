"""`DistributedDataParallel` with torch's interface: wraps the model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from syncline._compat.ddp import ddp_ignored
from syncline.engine.attach import attach
from syncline.engine.shutdown import close_when_collected
from syncline.engine.sync import Sync
from syncline.errors import UsageError
from syncline.plan import Plan


class DistributedDataParallel(nn.Module):
    """Wraps a model like `torch.nn.parallel.DistributedDataParallel`; the training loop stays as it is.

    An optimizer of the model's parameters is found at its first step, which waits for all gradients; from the next step
    on it steps by units, as with `attach`. `sync` is the engine; its `state_dict` holds the codec state. Deleting the
    wrapper closes the engine; `close()` does so at a time of your choice.

    Args:
        module: The model.
        device_ids, output_device: One device or none. The model stays where it is, and inputs are not moved.
        broadcast_buffers, forward_sync_buffers: Send rank 0's buffers to all ranks after every backward pass.
        process_group, device_mesh: The ranks that take part; give one of the two.
        compress, plan, exchange: As in `attach`.
        optimizer: One or several optimizers, to step by units from the first step on.
        options: The other options of `attach`.

    Accepted and ignored: dim, init_sync, bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters, check_reduction,
    gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params, batched_grad_copy. There are no buckets (the
    plan says what travels together), unused parameters are always found, and replicas start with rank 0's values.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
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
            raise UsageError(f"device_ids has {len(device_ids)} devices: start one process per device")
        if mixed_precision is not None:
            raise UsageError("mixed_precision is not supported: use torch.autocast, or compress='bf16' for the network")
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise UsageError("delay_all_reduce_named_params is not supported: a plan's order says what is sent last")
        if ddp_ignored(module):
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
        self._sync: Sync | None = sync
        # The garbage collector runs at another time on every rank, so no engine may reuse the groups.
        self._finalizer: Any = close_when_collected(self, partial(sync.close, reuse_groups=False))
        self._finalizer.atexit = False  # the engine closes itself at exit

    @property
    def sync(self) -> Sync:
        """The engine: `wait`, `state_dict` of the codecs, `replan`."""
        if self._sync is None:
            raise UsageError("this is a copy of a wrapped model, which exchanges nothing: wrap copy.module by itself")
        return self._sync

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally: backward passes in this context exchange nothing."""
        return nullcontext() if self._sync is None else self._sync.no_sync()

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: every rank must run the same number of steps."""
        raise UsageError("join() is not supported: give every rank the same number of batches (drop_last=True)")

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: name a codec when wrapping the model."""
        raise UsageError("there are no comm hooks here: name a codec, compress='powersgd(rank=4)', when wrapping")

    def close(self) -> None:
        """Finish what is in flight and end all threads; `module` is a plain model again."""
        if self._sync is not None:
            self._finalizer.detach()
            self._sync.close()

    def __getstate__(self) -> dict[str, Any]:
        # Copies (EMA, pickles) are plain modules: nobody exchanges the gradients of their parameters.
        return {**self.__dict__, "_sync": None, "_finalizer": None}
