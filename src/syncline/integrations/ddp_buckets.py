"""A codec on buckets of gradients, as DDP forms them; what it keeps belongs to parameters, whatever their bucket is.

DDP tells when a bucket is ready and nothing else. So a pass whose last bucket has come is a step, and what its codecs
have left is kept when the next pass begins or somebody asks for it; a pass that was broken off leaves nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from syncline._compat import GradBucket
from syncline.engine.launch.batches import Where
from syncline.engine.launch.units import Slot, UnitRun
from syncline.engine.shutdown import close_when_gone
from syncline.engine.state import flat_state, read_state
from syncline.errors import UsageError
from syncline.integrations.bucket_exchange import BucketWire
from syncline.plan import Unit


class BucketRun(UnitRun):
    """A bucket at work: averaged values go back into the bucket's own memory."""

    def receive(self, place: int, first: int, values: Tensor) -> None:
        """Averaged values of a parameter's gradient."""
        target = self.targets[place]
        assert target is not None
        target.copy_(values.view(target.shape))

    def commit(self, *, keep: bool) -> None:
        """Keep what the last exchange left, or forget it."""
        for launch in self.launches:
            if keep:
                launch.commit()
            launch.tentative = None

    def states(self) -> dict[int, dict[str, Tensor]]:
        """The committed state by the parameter's identity."""
        identity = {slot.name: id(slot.parameter) for slot in self.slots}
        found: dict[int, dict[str, Tensor]] = {}
        for launch in self.launches:
            for cell in launch.cells:
                for name, key, _, tensor in cell.dump():
                    found.setdefault(identity[name], {})[key] = tensor
        return found


class Buckets:
    """The codec of one DDP model: its state, and what it does to a bucket."""

    def __init__(self, spec: str, *, exchange: str | None, process_group: Any, seed: int) -> None:
        self._wire = BucketWire(spec, carrier=exchange, process_group=process_group, seed=seed)
        self._slots: dict[int, Slot] = {}
        self._units: list[BucketRun] = []
        self._parked: dict[int, dict[str, Tensor]] = {}
        """State of parameters that have no bucket yet, by the parameter's identity."""
        self._sent = 0
        self._complete = True
        close_when_gone(self, lambda wire=self._wire: wire.close(reuse=False))  # type: ignore[misc]

    @property
    def step(self) -> int:
        """How many backward passes have been exchanged."""
        return self._wire.step

    def average(self, bucket: GradBucket) -> "Future[Tensor]":
        """Run the codec on a bucket; the future is of its buffer, with averaged gradients."""
        buffer = bucket.buffer()
        if self._wire.world == 1:
            self._wire.step += bucket.is_last()
            done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            done.set_result(buffer)
            return done
        if buffer.layout != torch.strided:
            raise UsageError("a bucket holds sparse gradients: build the model's embeddings with sparse=False")
        if bucket.index() == 0:
            self._begin(buffer.device)
        elif bucket.index() != self._sent:
            raise UsageError("buckets of two models meet in one hook: call syncline.ddp_hook once for each model")
        unit = self._unit(bucket)
        for launch in unit.launches:
            launch.where = Where(self._wire.step, self._wire.rank, self._wire.world, self._wire.seed)
        future = self._wire.send(unit, buffer)
        self._sent += 1
        if bucket.is_last():
            self._complete = True
            self._wire.step += 1
        return future

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's codec state, `"<parameter>.<key>"` to plain tensors, and the step; save one a rank.

        Names are those of the wrapped module, without DDP's "module.".
        """
        self._settle()
        kept = {**self._parked, **{i: s for unit in self._units for i, s in unit.states().items()}}
        states = {name: kept[id(p)] for name, p in _named(model) if id(p) in kept}
        return flat_state(states, self._wire.step)

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`, of this hook or of `attach`; any bucket size will do."""
        self._settle()
        parameters = dict(_named(model))
        states, step = read_state(state, parameters)
        self._parked = {
            id(parameters[n]): {k: t.to(parameters[n].device, copy=True) for k, t in s.items()}
            for n, s in states.items()
        }
        self._units = []
        self._wire.step = step

    def close(self) -> None:
        """End all threads; DDP must not call the hook any more."""
        try:
            self._settle()
        finally:
            self._wire.close()

    def _settle(self) -> None:
        for unit in self._units[: self._sent]:
            unit.exchanged.wait()
            unit.commit(keep=self._complete)
        self._sent = 0

    def _begin(self, device: torch.device) -> None:
        self._settle()
        self._complete = False
        self._wire.begin(device)

    def _unit(self, bucket: GradBucket) -> BucketRun:
        parameters: list[Any] = bucket.parameters()
        at = self._sent
        views = {id(p): _view(g, p) for p, g in zip(parameters, bucket.gradients(), strict=True)}
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
        return unit

    def _regroup(self, at: int, parameters: Sequence[Tensor]) -> None:
        """DDP has formed other buckets from here on: their units are new, what parameters have kept stays."""
        for unit in self._units[at:]:
            self._parked.update(unit.states())
        del self._units[at:]
        # In one order whatever DDP's is, which follows the order of gradients.
        slots = sorted((self._slots[id(p)] for p in parameters), key=lambda slot: slot.index)
        wire = self._wire
        row = Unit(f"bucket {at}", tuple(slot.name for slot in slots), wire.codec.text, wire.carrier)
        unit = BucketRun(row, slots, wire.links)
        states = {slot.name: self._parked.pop(id(slot.parameter), {}) for slot in slots}
        for launch in unit.launches:
            wire.open(launch.rounds)
            for cell in launch.cells:
                cell.load({name: state for name, state in states.items() if state})
        self._units.append(unit)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    inner = getattr(model, "module", model)
    return list(inner.named_parameters())


def _view(grad: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in its bucket, seen with the parameter's strides (channels last): that is how DDP lays it out."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.is_contiguous() or extent != parameter.numel():
        return grad
    return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset())
