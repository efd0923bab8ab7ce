"""`ddp_hook`: a communication hook for torch's DistributedDataParallel with our codecs and exchanges.

Codec state belongs to parameters, whatever bucket they are in. DDP tells a hook only when a bucket is ready. So a pass
whose last bucket has come counts as a step. The codec states that it left are kept when the next pass begins or
somebody asks for them; a pass that broke off leaves none. Buckets come one by one, in the same order on every rank, and
are launched in that order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from syncline._compat.ddp import GradBucket
from syncline.engine.launch.units import Slot, UnitRun, as_real, flat_state, gather_states, read_state
from syncline.engine.process_groups import GroupLike
from syncline.engine.shutdown import close_when_collected
from syncline.errors import UsageError
from syncline.integrations.buckets import BucketExchange
from syncline.plan import Unit


def ddp_hook(
    spec: str, *, exchange: str | None = None, process_group: GroupLike = None, seed: int = 0
) -> tuple["HookState", Callable[["HookState", GradBucket], "Future[Tensor]"]]:
    """The state and the hook for a codec: `ddp_model.register_comm_hook(*syncline.ddp_hook("acpsgd(rank=32) | bf16"))`.

    Call it once on every rank, and once for each DDP model. Keep the state if you save checkpoints: its
    `state_dict(ddp_model)` holds residuals and factors by parameter name.

    Args:
        spec: A codec spec such as `"powersgd(rank=4)"`; `"none"` is plain DDP.
        exchange: The communication pattern, such as `"ring"`. None: the codec's default.
        process_group: The process group of the DDP model. None: all ranks.
        seed: Seed of codecs that draw random numbers; the same on all ranks.
    """
    return HookState(spec, exchange=exchange, process_group=process_group, seed=seed), hook


def hook(state: "HookState", bucket: GradBucket) -> Future[Tensor]:
    """DDP calls this with every bucket. It reads the annotations, so those must not be strings."""
    return state.average(bucket)


class HookState:
    """The state of a DDP hook: a codec, its state by parameter, and the buckets of the current pass."""

    def __init__(self, spec: str, *, exchange: str | None, process_group: GroupLike, seed: int) -> None:
        self._exchange = BucketExchange(
            spec, pattern=exchange, process_group=process_group, seed=seed, caller="ddp_hook"
        )
        self._slots: dict[int, Slot] = {}
        self._units: list[UnitRun] = []
        self._unused_states: dict[int, dict[str, Tensor]] = {}
        """Codec state of parameters that have no bucket yet, by the parameter's `id`."""
        self._sent = 0
        self._complete = True
        inner = self._exchange  # not `self`, which could then never be collected
        close_when_collected(self, lambda: inner.close(reuse_groups=False))

    @property
    def step(self) -> int:
        """The number of backward passes that were exchanged."""
        return self._exchange.step

    def average(self, bucket: GradBucket) -> "Future[Tensor]":
        """Run the codec on a bucket; the future gives its buffer, with averaged gradients."""
        buffer = bucket.buffer()
        if self._exchange.world == 1:
            self._exchange.step += bucket.is_last()
            done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            done.set_result(buffer)
            return done
        if buffer.layout != torch.strided:
            raise UsageError("a bucket holds sparse gradients: build the model's embeddings with sparse=False")
        if bucket.index() == 0:
            self._finish_pass()
            self._complete = False
            self._exchange.begin(buffer.device)
        elif bucket.index() != self._sent:
            raise UsageError("buckets of two models come to one hook: call syncline.ddp_hook once for each model")
        future = self._exchange.send(self._unit(bucket), buffer)
        self._sent += 1
        if bucket.is_last():
            self._complete = True
            self._exchange.step += 1
        return future

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's codec state, `"<parameter>.<key>"` to plain tensors, and the step; save one per rank.

        Names are those of the wrapped module, without DDP's "module.".
        """
        self._finish_pass()
        kept = self._unused_states | _states(self._units)
        states = {name: kept[id(p)] for name, p in _named(model).items() if id(p) in kept}
        return flat_state(states, self._exchange.step)

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of this hook or of `attach`, with any bucket size."""
        self._finish_pass()
        parameters = _named(model)
        states, step = read_state(state, parameters)
        self._unused_states = {
            id(parameters[n]): {k: t.to(parameters[n].device, copy=True) for k, t in s.items()}
            for n, s in states.items()
        }
        self._units = []
        self._exchange.step = step

    def close(self) -> None:
        """End all threads; DDP must not call the hook after this."""
        try:
            self._finish_pass()
        finally:
            self._exchange.close()

    def _finish_pass(self) -> None:
        """Wait for all buckets; keep their codec states if the pass was complete."""
        for unit in self._units[: self._sent]:
            self._exchange.wait(unit)
            for launch in unit.launches:
                if self._complete:
                    launch.commit()
                launch.tentative = None
        self._sent = 0

    def _unit(self, bucket: GradBucket) -> UnitRun:
        parameters: list[Any] = bucket.parameters()  # torch types them as tensors
        at = self._sent
        views = {id(p): as_real(_view(g, p)) for p, g in zip(parameters, _gradients(bucket), strict=True)}
        for p in parameters:
            # The first pass shows the parameters in an order that is the same on all ranks and in every run.
            number = len(self._slots)
            self._slots.setdefault(id(p), Slot(f"p{number}", p, number, p.detach()))
        if at >= len(self._units) or views.keys() != {id(slot.parameter) for slot in self._units[at].slots}:
            self._regroup(at, parameters)
        unit = self._units[at]
        unit.begin()
        unit.grads = [views[id(slot.parameter)] for slot in unit.slots]
        unit.targets = list(unit.grads)
        unit.takes_memory = [False] * len(unit.grads)  # averages go back into the bucket
        return unit

    def _regroup(self, at: int, parameters: Sequence[Tensor]) -> None:
        """DDP has formed other buckets from this one on: make new units; the state of parameters is kept."""
        self._unused_states |= _states(self._units[at:])
        del self._units[at:]
        # In an order of our own: DDP's follows the order in which gradients arrive.
        slots = sorted((self._slots[id(p)] for p in parameters), key=lambda slot: slot.index)
        exchange = self._exchange
        row = Unit(f"bucket {at}", tuple(slot.name for slot in slots), exchange.codec.text, exchange.pattern)
        unit = UnitRun(row, slots, exchange.links)
        states = {slot.name: self._unused_states.pop(id(slot.parameter), {}) for slot in slots}
        for launch in unit.launches:
            exchange.open(launch.rounds)
            for batch in launch.batches:
                batch.load({name: state for name, state in states.items() if state})
        self._units.append(unit)


def _states(units: Sequence[UnitRun]) -> dict[int, dict[str, Tensor]]:
    """The committed codec state by the parameter's `id`."""
    identity = {slot.name: id(slot.parameter) for unit in units for slot in unit.slots}
    return {identity[name]: state for name, state in gather_states(units, {}).items()}


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(getattr(model, "module", model).named_parameters())


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """The gradients of a bucket; torch's own `gradients()` are wrong for complex ones, whose buffer is real."""
    parameters: list[Tensor] = bucket.parameters()
    if not parameters[0].is_complex():
        return bucket.gradients()
    parts = torch.view_as_complex(bucket.buffer().view(-1, 2)).split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _view(grad: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in its bucket with the parameter's strides (channels last), as DDP lays it out."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.is_contiguous() or extent != parameter.numel():
        return grad
    return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset())
