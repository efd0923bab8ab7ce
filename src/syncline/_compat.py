"""Private, untyped or version-dependent torch API, all of it, so that a torch release is one file to read."""

import functools
import inspect
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore as FileStore  # type: ignore[attr-defined]
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]
from torch.distributed import rendezvous as rendezvous  # type: ignore[attr-defined]

NoSubclasses: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses are plain tensors; it holds for the thread that enters it."""


def subclasses_enabled() -> bool:
    """Whether this thread calls `__torch_function__` of tensor subclasses: it is not inside `NoSubclasses`."""
    return bool(torch._C._is_torch_function_enabled())


def share_reducer(kind: type[Tensor], before: Callable[[Tensor], None]) -> None:
    """Let `torch.multiprocessing` send tensors of this class by shared memory, as it sends plain ones.

    `before(tensor)` must restore the tensor's plain class.
    """
    from multiprocessing.reduction import ForkingPickler

    def reduce(tensor: Tensor) -> Any:
        before(tensor)
        return ForkingPickler._extra_reducers.get(type(tensor), lambda t: t.__reduce_ex__(2))(tensor)  # type: ignore[attr-defined]

    ForkingPickler.register(kind, reduce)


def own_tensors(module: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The module's own parameters and buffers, without a copy."""
    return module._parameters, module._buffers


def script_tensors(module: Any) -> Iterator[Tensor]:
    """All parameters and buffers of a TorchScript module in C++ (`ScriptMethod.owner`), its children's included."""
    tables: Any = torch._C
    for table in (tables.ParameterDict, tables.BufferDict):
        for _, tensor in table(module).items():
            yield tensor
    for _, child in tables.ModuleDict(module).items():
        yield from script_tensors(child)


def storage_users(tensor: Tensor) -> int:
    """How many tensors and storage objects share a tensor's memory, the tensor itself included."""
    with NoSubclasses():
        storage = tensor.untyped_storage()
    # One of the users is the storage object made here.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_address(tensor: Tensor) -> int:
    """Which memory a tensor is in: equal for tensors that share it."""
    with NoSubclasses():
        return int(tensor.untyped_storage()._cdata)


def export_cuda_memory(tensor: Tensor) -> list[int | str | bool]:
    """A handle of a whole GPU allocation as plain values, for one other process; export once for each."""
    found = tensor.untyped_storage()._share_cuda_()
    return [value.hex() if isinstance(value, bytes) else value for value in found]


def open_cuda_memory(handle: Sequence[int | str | bool]) -> Tensor:
    """The bytes of another process's GPU memory, from its handle; they live as long as that process keeps them."""
    values = [bytes.fromhex(value) if isinstance(value, str) else value for value in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*values)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def unowned_view(tensor: Tensor) -> Tensor:
    """A view of a tensor that does not keep its memory: only for memory that stays, as that of CUDA graphs does."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first tensor of each pair from the second: on CUDA, in as few kernels as possible."""
    alike = [pair for pair in pairs if pair[0].stride() == pair[1].stride()]
    if alike:  # one pair that is not would make a kernel of each
        torch._foreach_copy_([into for into, _ in alike], [values for _, values in alike])
    if len(alike) < len(pairs):
        for into, values in pairs:
            if into.stride() != values.stride():
                into.copy_(values)


def run_last(parameter: Tensor, handle: Any) -> None:
    """Make a post-accumulate hook the last one of its parameter; only before the gradient is accumulated."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)


def has_other_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has several post-accumulate hooks."""
    return len(parameter._post_accumulate_grad_hooks) > 1


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place; reads no values."""
    with NoSubclasses():
        return [tensor._version for tensor in tensors]


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that runs now has ended; only from a hook of that pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs a backward pass (is inside one of its hooks)."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_nested_backward() -> bool:
    """Whether this thread is inside a backward pass that a custom function's backward started (checkpointing)."""
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def default_store() -> Store:
    """The store that the default process group met at."""
    return dist.distributed_c10d._get_default_store()


def world_group() -> dist.ProcessGroup:
    """The default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that a collective of this group may take."""
    made = group or world_group()
    options = made._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")).options
    return float(options._timeout.total_seconds())


_groups_made: "weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]]" = weakref.WeakKeyDictionary()
"""Groups that `new_group` has made in this world, by ranks: the same on all members, since they make it together."""


def new_group(
    ranks: Sequence[int], *, timeout: Any, backend: str | None = None, slim: bool = False
) -> dist.ProcessGroup:  # fmt: skip
    """A group of these ranks, made without the others. `slim`: with NCCL, one channel, the smallest share of a GPU."""
    whole = len(ranks) == dist.get_world_size()
    options = None
    if slim:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.max_ctas = 1
    with _unique_group_name(ranks):
        return dist.new_group(  # type: ignore[no-any-return]
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=not whole
        )


@contextmanager
def _unique_group_name(ranks: Sequence[int]) -> Iterator[None]:
    """Let torch give a group made by its members alone a name that no earlier one of the same ranks had.

    torch hashes the ranks and the number of groups that exist. Once a group was destroyed, the next one would get its
    name, find its addresses in the store, and wait for connections that nobody accepts.
    """
    c10d: Any = dist.distributed_c10d
    made, key = _groups_made.setdefault(world_group(), Counter()), tuple(sorted(ranks))
    made[key] += 1
    number, original = made[key], c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda members: original([*members, -number])
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


def abort_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Abort what an NCCL group has in flight, so that a host which waits for it is released."""
    with suppress(Exception):
        group._get_backend(device).abort()  # type: ignore[union-attr]


def cut_gloo(group: dist.ProcessGroup) -> None:
    """Close a Gloo group's connections: whoever waits in it, here and on other ranks, gets an error now.

    Gloo's `abort` wakes nobody. A receive that times out closes all connections of the group. One from a rank whose
    connection is closed already does not, so all ranks are tried.
    """
    if dist.get_backend(group) != "gloo":
        return
    for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
        with suppress(RuntimeError):
            late: Any = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=(1 << 31) - 1)
            late.wait(timedelta(milliseconds=1))


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The optimizer class's own `step`, without the hooks and profiler that torch wraps around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def step_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that torch calls before and after this optimizer's step, in torch's order."""
    from torch.optim import optimizer as module

    before = [*module._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()]
    return before, after


def wrapped_by_scheduler(function: Any) -> bool:
    """Whether a learning-rate scheduler has wrapped this optimizer method."""
    return hasattr(function, "_wrapped_by_lr_sched")


def pass_for_step(function: Any, original: Any) -> None:
    """Let a learning-rate scheduler accept `function` in place of `original`, which it may have wrapped."""
    if wrapped_by_scheduler(original):
        function._wrapped_by_lr_sched = True


def note_step_called(optimizer: Any) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped."""
    optimizer._opt_called = True


def on_every_step(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call these around every optimizer's step; returns a function that removes them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def raw_stream(index: int) -> int:
    """The handle of a CUDA device's current stream; `torch.cuda.current_stream` makes an object each time."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def on_every_backward(around: Callable[..., Any]) -> Callable[[], None]:
    """Call `around(backward, *args, **kwargs)` for every backward pass; returns a function that removes it.

    `Tensor.backward` looks `torch.autograd.backward` up when it is called, so one place is enough.
    """
    return replace_function(torch.autograd, "backward", around)


def replace_function(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's function by `around(original, *args, **kwargs)`; returns a function that restores it."""
    original = getattr(owner, name)
    lost = False

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if lost else around(original, *args, **kwargs)

    def restore() -> None:
        nonlocal lost
        lost = True
        # If somebody has replaced our function, theirs stays and calls the original through ours.
        if getattr(owner, name) is replaced:
            setattr(owner, name, original)

    setattr(owner, name, replaced)
    return restore


def let_script_know(original: Any, function: Any) -> Callable[[], None]:
    """TorchScript code that calls `function` gets the operator of `original`, until the returned function is called.

    TorchScript knows functions by id, and another function may get the id of one that is gone.
    """
    from torch.jit import _builtins

    operator = _builtins._find_builtin(original)
    if operator is not None:
        _builtins._register_builtin(function, operator)

    def forget() -> None:
        if operator is not None:
            _builtins._get_builtin_table().pop(id(function), None)

    return forget


def unguarded_readers() -> list[tuple[Any, str]]:
    """Functions and methods that read a tensor without asking its `__torch_function__`: (owner, name)."""
    from torch._functorch import eager_transforms, predispatch

    found: list[tuple[Any, str]] = [
        *((torch, name) for name in ("tensor", "as_tensor", "asarray", "scalar_tensor", "to_dlpack")),
        *((torch, f"sparse_{kind}_tensor") for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
        (torch.utils.dlpack, "to_dlpack"),
        *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")),
        *((torch.Tensor, name) for name in ("new", "new_tensor")),
        *((eager_transforms, name) for name in ("_wrap_for_grad", "_wrap_functional_tensor")),
        (predispatch, "_add_batch_dim_impl"),
        (torch.autograd, "_engine_run_backward"),
        (torch.jit.ScriptFunction, "__call__"),
    ]
    if dist.is_available():
        from torch._C import _distributed_c10d as c10d

        for kind in (c10d.ProcessGroup, c10d.Backend):
            found += [(kind, name) for name in _COLLECTIVES.split() if name in vars(kind)]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


_COLLECTIVES = """
allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced
all_gather_single all_gather_single_coalesced alltoall alltoall_base all_to_all_single broadcast gather reduce
reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single
reduce_scatter_single_coalesced
scatter send recv recv_anysource
"""


def unguarded_by_class() -> list[tuple[Any, str]]:
    """The same, where the class of the tensor also decides about the result."""
    return [
        (torch.Tensor, "__new__"),
        (torch.nn.Parameter, "__new__"),
        (torch.nn.Buffer, "__new__"),
        *((torch.Tensor, name) for name in ("as_subclass", "_make_subclass", "set_")),
    ]


def script_methods() -> list[tuple[Any, str]]:
    """The calls of methods of TorchScript modules."""
    return [(torch._C.ScriptMethod, "__call__")]


def note_functions_for_compile() -> None:
    """Let torch.compile note torch's functions, which it knows by their objects, before some are replaced."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    trace_rules.get_torch_obj_rule_map()
    with suppress(AttributeError):
        TorchInGraphFunctionVariable._get_handlers()


def forget_hooks(tensor: Any) -> None:
    """After `swap_tensors`: the lists of hooks stay with the Python object, but torch does not call them any more.

    Hooks that are registered from now on are called.
    """
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None


def swap_owner() -> Any:
    """The module that `swap_tensors` is looked up in."""
    return torch.utils


def reducer_group(model: Any, group: dist.ProcessGroup) -> None:
    """Make the reducer of torch's DistributedDataParallel use `group` (of the same ranks) for its buckets."""
    model.reducer._update_process_group(group)


def make_reducer(
    parameters: Sequence[Tensor], buckets: Sequence[Sequence[int]], group: dist.ProcessGroup, *, as_views: bool
) -> Any:
    """torch's C++ reducer, as DistributedDataParallel makes it: hooks of these parameters send buckets in order.

    `as_views`: gradients are views of the buckets. It must be deleted before its group.
    """
    sizes = [sum(parameters[i].nbytes for i in bucket) for bucket in buckets]
    indices = [list(bucket) for bucket in buckets]
    return dist.Reducer(list(parameters), indices, sizes, group, gradient_as_bucket_view=as_views)  # type: ignore[attr-defined]


def set_reducer_hook(reducer: Any, hook: Callable[[Any, GradBucket], "torch.futures.Future[Any]"]) -> None:
    """Let `hook` carry the buckets; once per reducer."""
    dist._register_comm_hook(reducer, None, hook)  # type: ignore[attr-defined]


def mark_ready(reducer: Any, index: int) -> None:
    """Tell the reducer that a parameter's gradient is complete, if it does not know; only from a hook of a pass."""
    try:
        reducer._autograd_hook(index)
    except RuntimeError as error:
        if "ready only once" not in str(error):
            raise


def disarm_reducer(reducer: Any) -> None:
    """Make the reducer ignore gradients until it is prepared for the next pass."""
    reducer._reset_state()


def check_finished(reducer: Any) -> None:
    """Raise unless the reducer has averaged all gradients of the last pass."""
    reducer._check_reducer_finalized()


def compiled_autograd() -> bool:
    """Whether backward passes are compiled now; hooks of C++ code do not run then."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def remove_reducer(reducer: Any) -> None:
    """Remove the reducer's hooks from its parameters."""
    reducer._remove_autograd_hooks()


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Run a backward pass that adds `gradient` to this parameter's gradient, unseen by `around_gradients`."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((parameter,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def around_gradients(around: Callable[..., Any]) -> Callable[[], None]:
    """Call `around(run, create_graph)` for every pass that adds to `.grad`; returns a function that removes it.

    `around` calls `run()`. `Tensor.backward` and `torch.autograd.backward` come through here, even if kept by name.
    """

    def replaced(original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad", False):
            return original(roots, *args, **kwargs)
        return around(lambda: original(roots, *args, **kwargs), bool(args[2]))

    return replace_function(torch.autograd, "_engine_run_backward", replaced)


def broadcast_coalesced(group: dist.ProcessGroup, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite the tensors with those of this rank of the group, in few messages, as DistributedDataParallel does."""
    dist._broadcast_coalesced(group, list(tensors), 250 << 20, source)  # type: ignore[attr-defined]


def on_coalesced_broadcast(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of the broadcast with which DistributedDataParallel sends rank 0's buffers in forward."""
    return replace_function(dist, "_broadcast_coalesced", around)


def around_buffers(model: Any, around: Callable[..., Any]) -> None:
    """Put `around` in place of the broadcast of the buffers of one DistributedDataParallel, for its whole life."""
    original = model._distributed_broadcast_coalesced
    model._distributed_broadcast_coalesced = functools.partial(around, original)


def on_every_wait(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of `Work.wait`, which Python code calls; torch's collectives that block call it too."""
    return replace_function(dist.Work, "wait", around)


def on_fsdp_messages(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of the calls in which FSDP2, if it is loaded, packs, sends, awaits and unpacks messages."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    owner = getattr(module, "FSDPParamGroup", None)
    calls = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward")
    undo = [replace_function(owner, call, around) for call in calls if hasattr(owner, call)]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def on_every_batch(around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around` in place of the call that gets the next batch of any `torch.utils.data.DataLoader`."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return replace_function(_BaseDataLoaderIter, "__next__", around)


def has_comm_hook(model: Any) -> bool:
    """Whether a comm hook is registered with torch's DistributedDataParallel; True where that is not known."""
    return bool(getattr(model, "_comm_hooks", True))


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model or a part of it goes through torch.compile."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def replace_compiled_call(model: Any, around: Callable[..., Any]) -> Callable[[], None] | None:
    """Put `around(compiled, *args, **kwargs)` in place of the call that `model.compile()` made.

    Returns the function that restores it, or None where the model is not compiled in place.
    """
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is None:
        return None
    replaced = model._compiled_call_impl = functools.partial(around, compiled)
    known = weakref.ref(model)

    def restore() -> None:
        model = known()
        if model is not None and model._compiled_call_impl is replaced:
            model._compiled_call_impl = compiled

    return restore


def caller_module(depth: int) -> str:
    """The name of the module whose code called this function's caller, `depth` calls up from there."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def on_every_forward(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call these around the forward of every module; returns a function that removes them."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def on_compile_start(callback: Callable[..., None]) -> Callable[[], None]:
    """Call `callback` whenever torch.compile starts to trace a frame; returns a function that removes it.

    Called again with the same one, it has an effect only if somebody has removed the callback.
    """
    from torch._dynamo.callback import callback_handler

    if callback not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(callback)

    def remove() -> None:
        if callback in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(callback)

    return remove


def script_compiler() -> Any:
    """The module in which `torch.jit.script` and `torch.jit.trace` look up `create_script_module`."""
    from torch.jit import _recursive

    return _recursive


def forward_pre_hooks(module: Any) -> "OrderedDict[int, Callable[..., Any]]":
    """The module's own forward pre-hooks."""
    return module._forward_pre_hooks  # type: ignore[no-any-return]


@contextmanager
def not_compiling() -> Iterator[None]:
    """Clear the process-wide flag that torch.compile is tracing: optimizers compute differently under it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_optimized_module(module: Any) -> bool:
    """Whether this is the result of `torch.compile(module)`."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a DTensor, without importing them."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "_local_tensor")


def is_fsdp_managed(module: Any) -> bool:
    """Whether FSDP (1 or 2) shards the parameters of this module."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def module_tables(model: Any) -> list[dict[str, Any]]:
    """The dicts that hold the parameters and the children of every module; they change with the model."""
    tables = [table for module in model.modules() for table in (module._parameters, module._modules)]
    return [table for table in tables if isinstance(table, dict)]  # TorchScript modules have others, and do not change


def accumulator_is_held(parameter: Tensor) -> bool:
    """Whether somebody holds the autograd node that accumulates this gradient: a live graph, or DDP's reducer.

    Without a holder, every access makes a new node, without the metadata of the last one.
    """

    def node() -> Any:
        with torch.enable_grad():
            return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    node().metadata["syncline"] = True
    return node().metadata.pop("syncline", None) is not None


def ddp_ignored(module: Any) -> bool:
    """Whether the module has a list of parameters that torch's DDP is to ignore."""
    return bool(getattr(module, "_ddp_params_and_buffers_to_ignore", None))


def flight_recorder_dump() -> bytes:
    """torch's record of this process's last collectives, as a pickle of plain values: NCCL's if it is in use."""
    c10d: Any = torch._C._distributed_c10d
    if dist.is_initialized() and "nccl" in dist.get_backend() and hasattr(c10d, "_dump_nccl_trace"):
        return bytes(c10d._dump_nccl_trace())
    return bytes(c10d._dump_fr_trace())


_GETTERS = """
shape dtype device layout ndim is_leaf is_sparse is_cuda is_cpu is_meta is_quantized is_mkldnn itemsize nbytes grad_fn
retains_grad requires_grad grad _version output_nr _backward_hooks _post_accumulate_grad_hooks is_mps is_sparse_csr
is_nested is_xpu
"""
_METHODS = """
size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex get_device
storage_offset is_same_size register_hook register_post_accumulate_grad_hook requires_grad_ __len__ __hash__ is_signed
is_inference
"""


def metadata_functions() -> frozenset[Any]:
    """The functions, as `__torch_function__` gets them, that read no values of a tensor."""
    functions: set[Any] = set()
    for name in _GETTERS.split():
        attribute = getattr(torch.Tensor, name, None)
        if hasattr(attribute, "__get__"):
            functions.add(attribute.__get__)  # type: ignore[union-attr]
    for name in ("grad", "requires_grad", "_backward_hooks"):
        functions |= {getattr(torch.Tensor, name).__set__, getattr(torch.Tensor, name).__delete__}
    functions |= {getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)}
    return frozenset(functions | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size})


__all__ = ["FileStore", "GradBucket", "NoSubclasses", "PrefixStore", "Store", "TCPStore", "rendezvous"]


def fsdp_requires_all_reduce(module: Any) -> bool:
    """Whether `set_requires_all_reduce(False)` is not in force on this FSDP2 module."""
    return all(group.all_reduce_grads for group in _fsdp_groups(module))


def fsdp_divide_factor(module: Any) -> float | None:
    """The factor of `set_gradient_divide_factor` on this FSDP2 module, if it was called."""
    return next((group.gradient_divide_factor for group in _fsdp_groups(module)), None)


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.13
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
