"""`attach`: the one line that a training loop needs."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncline._compat.tensors import is_dtensor
from syncline.engine.attached_models import refuse_attached
from syncline.engine.node_layout import required_ranks_per_node
from syncline.engine.other_wrappers import refuse_wrapped
from syncline.engine.process_groups import GroupLike, Groups, parent_group, timeout_of
from syncline.engine.protocols import Freezing
from syncline.engine.sync import Sync
from syncline.engine.tuning.plan_memory import PlanMemory
from syncline.errors import UsageError, short
from syncline.exchange import build as build_exchange
from syncline.exchange import resolved
from syncline.plan import ALWAYS, Plan, Shape, bucket_plan, default_plan, shape_of
from syncline.plan import load as load_plan
from syncline.plan.auto_spec import parse_auto
from syncline.plan.cache import cache_folder
from syncline.plan.check import REDUCER_CODECS
from syncline.trace import Recorder
from syncline.trace.record.session import record_attached

FULL = "full"
"""`tune="full"`: measure the job at once, whatever that costs."""
START = "reducer"
"""The executor of the first steps, where torch's reducer can run them; `overlap`: always our own."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    compress: str | None = None,
    plan: Plan | str | Path | None = None,
    exchange: str | None = None,
    process_group: GroupLike = None,
    buffers: bool = True,
    update: str | None = None,
    timeout: float | None = None,
    sentinel: int = 100,
    recorder: Recorder | None = None,
    seed: int = 0,
    workers: int = 3,
    tune: bool | str = True,
    plan_cache: bool | str | Path | None = None,
    capture: bool = True,
    freeze: str | None = None,
) -> Sync:
    """Train `model` data-parallel: average its gradients over the ranks, and step `optimizer` as they arrive.

    Call it once on every rank, after the model is on its device. It starts with rank 0's parameters and buffers. The
    training loop stays as it is: `optimizer.step()` returns at once, and code that reads a parameter waits for its
    update.

    Args:
        model: The model; all its floating-point and complex parameters are averaged. It must be on one CPU or CUDA
            device.
        optimizer: The optimizer of its parameters, or several of them. One that is not given is found at its first
            step, which waits for all gradients.
        compress: A codec spec such as `"powersgd(rank=4) | bf16"`. None sends gradients uncompressed. `"auto"` measures
            the job and chooses, within an error budget (larger with SGD than with Adam): `"auto(error=0.1)"`,
            `"auto(int8, topk(ratio=0.01))"`.
        plan: A `Plan`, or the path of a plan file. It names codecs and exchanges, so leave out those options.
        exchange: The communication pattern, such as `"ring"`. None: the codec's default. `"hierarchical"` finds out
            which ranks share a node; `"hierarchical(node=2)"` names how many do.
        process_group: A process group, or one dimension of a DeviceMesh. None: all ranks.
        buffers: Send rank 0's buffers (BatchNorm statistics) to all ranks at the start and after every backward pass.
            False: every rank keeps its own.
        update: `"unit"`: update each unit as soon as its gradients are averaged. `"whole"`: step all parameters at
            once. None: `"whole"` only for optimizers that may need all parameters at once.
        timeout: Seconds after which a peer that does not take part in an exchange is an error. None: the group's.
        sentinel: Check every this many steps that replicas are equal and residuals small. 0: never.
        recorder: Receives the engine's spans. None: the process's recorder (see `trace.start`, SYNCLINE_TRACE).
        seed: Seed of codecs that draw random numbers; the same on all ranks.
        workers: Threads that run launches on a CPU; CUDA uses streams instead.
        tune: Find the fastest executor, buckets or launch order for this job while it trains, starting as DDP does;
            `"full"` measures network, codecs and layers at once, whatever that costs. Not with `plan`.
        plan_cache: Folder for the plans that tuning finds, so that the next run of the same job starts tuned. False: no
            such folder. None: as SYNCLINE_PLAN_CACHE says (a folder, or `off`), else `~/.cache/syncline/plans`; off
            under pytest.
        capture: On CUDA, replay the work of codecs that declare it as CUDA graphs. `plan.about["capture"]` says where.
        freeze: A freeze policy such as `"schedule(alpha=0.3)"`: after each epoch more of the model's first blocks stop
            training. Say `sync.freeze.end_epoch()`, or give the steps: `"schedule(alpha=0.3, every=500)"`. For
            fine-tuning; see docs/pipeline.md.

    Returns:
        The engine of this model. Use it to wait, to accumulate gradients, to save codec state and to close.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: give a torch Module, as in attach(model, optimizer)")
    for name, spec in (("compress", compress), ("exchange", exchange), ("freeze", freeze)):
        if not isinstance(spec, str | None):
            raise UsageError(f"{name} is {short(spec)}: give a string; its form is name(arg=value)")
    parent = parent_group(process_group)
    groups = Groups(parent, timeout_of(parent, timeout))
    named = _parameters(model)
    optimizers = _optimizers(optimizer, model)
    device = _device_of([p for _, p in named])
    shapes = [shape_of(name, p) for name, p in named]
    automatic = None if compress is None else parse_auto(compress)
    if automatic is not None:
        automatic = automatic.suited(adaptive=_adaptive(optimizers))
    overlap = _overlap_plan(
        plan, shapes, compress=compress, exchange=exchange, auto=automatic is not None, world=groups.world
    )
    overlap = _with_ranks_per_node(overlap, groups)
    if tune not in (True, False, FULL):
        raise UsageError(f"tune is {short(tune)}: use True, False or '{FULL}'")
    tuned = automatic is not None or (bool(tune) and plan is None)
    if groups.world > 1 and build_exchange(overlap.units[0].exchange).workers(groups.world) < groups.world:
        # Dedicated servers do not train: there is nothing to time on them, and they hold no replica to compare.
        tuned, sentinel = False, 0
    codecs = {unit.codec for unit in overlap.units} if automatic is None else {*ALWAYS, *automatic.codecs}
    sync = Sync(
        model,
        optimizers,
        groups=groups,
        device=device,
        plan=_first_plan(model, shapes, overlap) if tuned and tune != FULL else overlap,
        shapes=shapes,
        automatic=automatic,
        overlap=overlap if tuned else None,
        memory=PlanMemory(
            cache_folder(plan_cache),
            request=f"compress {automatic or compress}, exchange {exchange}, update {update}, workers {workers},"
            f" buffers {buffers}",
            codecs=sorted(codecs),
            recall=tune != FULL,
        ),
        buffers=buffers,
        update=update,
        sentinel=sentinel,
        recorder=recorder,
        seed=seed,
        workers=workers,
        capture=capture,
    )
    if freeze is not None:
        sync.freeze = _freezing(sync, freeze, optimizers)
    if recorder is None:
        record_attached(model, optimizers)  # SYNCLINE_TRACE
    return sync


Freezer = Callable[[Sync, str, Sequence[torch.optim.Optimizer]], Freezing]
_freezers: list[Freezer] = []


def use_freezer(make: Freezer) -> Freezer:
    """Decorator for the function that makes `attach(..., freeze=...)`: `pipeline` comes after the engine."""
    _freezers[:] = [make]
    return make


def _optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, model: nn.Module
) -> list[torch.optim.Optimizer]:
    """The optimizers that `attach` was given, each with parameters of the model; also one rank alone checks them."""
    several = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    ours = {id(p) for p in model.parameters()}
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise UsageError(f"optimizer is {short(given)}: give a torch Optimizer, or a list of them")
        if not any(id(p) in ours for group in one.param_groups for p in group["params"]):
            raise UsageError("the optimizer has none of the model's parameters: build it from model.parameters()")
    return several


def _adaptive(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer may scale each value by itself, as Adam does; also if none was given.

    A subclass of SGD with a step of its own may do anything.
    """
    plain = {inspect.unwrap(kind.step) for kind in (torch.optim.SGD, torch.optim.ASGD)}
    return not optimizers or not all(inspect.unwrap(type(one).step) in plain for one in optimizers)


def _freezing(sync: Sync, policy: str, optimizers: list[torch.optim.Optimizer]) -> Freezing:
    if not _freezers:
        sync.close()
        raise UsageError("freeze needs the package syncline.pipeline.freeze: import it, or call syncline.attach")
    try:
        return _freezers[0](sync, policy, optimizers)
    except BaseException:
        sync.close()
        raise


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that can train, if an engine can be attached to them."""
    if torch.is_inference_mode_enabled():
        raise UsageError("attach was called under torch.inference_mode: call it outside, where the model trains")
    everything = list(model.named_parameters())
    if lazy := [name for name, p in everything if is_lazy(p)]:
        raise UsageError(f"parameter '{lazy[0]}' has no shape yet: call the model once on an input before attach")
    if inference := [name for name, p in everything if p.is_inference()]:
        raise UsageError(
            f"parameter '{inference[0]}' was made under torch.inference_mode: make the model outside of it"
        )
    refuse_wrapped(model)
    refuse_attached(model, everything)
    if not any(p.requires_grad for _, p in everything):
        raise UsageError("no parameter of the model requires a gradient: there is nothing to train")
    return [(name, p) for name, p in everything if p.is_floating_point() or p.is_complex()]


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    """The device of all parameters, if the engine can train there."""
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): attach each part by itself"
        )
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on '{device}': move it to a CPU or CUDA device before attach")
    if any(is_dtensor(p) for p in parameters):
        raise UsageError("the model has DTensor parameters (FSDP, tensor parallel): attach works on plain replicas")
    return device


def _overlap_plan(
    plan: Plan | str | Path | None,
    shapes: Sequence[Shape],
    *,
    compress: str | None,
    exchange: str | None,
    auto: bool,
    world: int,
) -> Plan:
    """The given plan, or a default one. `auto`: the final one is found later, and may not be restricted by the user."""
    if auto and plan is not None:
        raise UsageError("compress='auto' finds a plan, and one was given: leave compress out, or the plan")
    if auto and exchange is not None:
        raise UsageError(
            f"compress='auto' chooses exchanges, and '{exchange}' was given: leave exchange out, or name a codec"
        )
    ranks = max(2, world)
    if plan is None:
        made = default_plan(shapes, compress=None if auto else compress, exchange=exchange, world=ranks)
    elif compress is not None or exchange is not None:
        raise UsageError("a plan names codecs and exchanges itself: leave compress and exchange out")
    else:
        made = plan if isinstance(plan, Plan) else load_plan(plan)
    made.check(shapes, world=ranks)
    return made


def _with_ranks_per_node(plan: Plan, groups: Groups) -> Plan:
    """The plan with the job's ranks per node, where an exchange (`hierarchical`) needs them and does not name them."""
    open_ones = [unit.exchange for unit in plan.units if resolved(unit.exchange, node=1) != unit.exchange]
    if not open_ones or groups.world == 1:
        return plan
    groups.open(0)
    node = required_ranks_per_node(groups, open_ones[0])
    return replace(plan, units=tuple(replace(u, exchange=resolved(u.exchange, node=node)) for u in plan.units))


def _first_plan(model: nn.Module, shapes: Sequence[Shape], overlap: Plan) -> Plan:
    """The plan of a job's first steps: DDP's buckets, if torch's reducer can send them; tuning finds a better one."""
    kinds = {(unit.codec, unit.exchange) for unit in overlap.units}
    (codec, exchange), *others = sorted(kinds)
    suits = not isinstance(model, torch.jit.ScriptModule) and not any(p.is_complex() for p in model.parameters())
    if START != "reducer" or others or codec not in REDUCER_CODECS or exchange != "allreduce" or not suits:
        return overlap
    return bucket_plan(shapes, codec=codec)
