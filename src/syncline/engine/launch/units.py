"""Run-time records of the plan: parameters (`Slot`), units (`UnitRun`), their launches, and their codec state."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from syncline import codecs
from syncline._compat.tensors import NoSubclasses, copy_all, storage_address, storage_users
from syncline.codecs.requests import Product
from syncline.engine.launch.batches import CodecBatch, States, count_rounds, launch_batches
from syncline.engine.launch.bf16_buffers import Bf16Buffers
from syncline.engine.launch.samples import LaunchSamples
from syncline.errors import UsageError
from syncline.exchange import Link
from syncline.plan import Unit, shape_of

STEP_KEY = "syncline.step"


@dataclass(eq=False)
class Slot:
    """A parameter: its name, its object, an alias of its memory for updates, and its part in this backward pass."""

    name: str
    parameter: nn.Parameter
    index: int
    alias: Tensor
    unit: "UnitRun | None" = None
    fired: bool = False
    """Whether its gradient was accumulated in this pass."""
    grad: Tensor | None = None
    """The object that `parameter.grad` was when its exchange began."""
    kept_grad: bool = False
    """Whether `parameter.grad` existed before this pass: its memory is the user's, and results are written there."""
    hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape = shape_of(self.name, self.parameter).shape
        """The shape of its gradient as codecs see it."""


class ParameterUpdate(NamedTuple):
    """A parameter that an optimizer will update: its group there, its slot (if it is the model's), its tensors."""

    group: int
    slot: Slot | None
    parameter: Tensor
    alias: Tensor
    grad: Tensor


@dataclass(frozen=True)
class StepContext:
    """The step and rank for which a codec runs."""

    step: int
    rank: int
    world: int
    seed: int


@dataclass(eq=False)
class Launch:
    """One part of a unit, and its progress in the current backward pass."""

    unit: "UnitRun"
    part: int
    batches: Sequence[CodecBatch]
    links: Sequence[Link]
    """One per round: rounds have their own process groups, so that no round's order depends on another's."""
    position: int = 0
    """Its place in the launch order of this pass."""
    ready: bool = False
    done: bool = False
    context: StepContext = field(default_factory=lambda: StepContext(0, 0, 1, 0))
    step: int = -1
    """The recorder's step when the backward pass began; a worker may run the launch in the next one."""
    tentative: list[dict[str, Tensor]] | None = None
    """The codec states that the last exchange would leave; the optimizer's step commits them."""
    chain: bool = False
    """Continue from the tentative states: gradients are accumulated over several exchanges."""
    event: Any = None
    """On CUDA: when its gradients are complete, later when its work is done."""
    measure: bool = False
    """Note this pass's norms, for the sentinel."""
    norms: Tensor | None = None
    """Norms of this rank's gradient and of the averaged one, as they were exchanged."""
    samples: LaunchSamples | None = None
    """Reads values of its gradients in some steps, for the guard of codec errors."""
    buffers: Bf16Buffers = field(default_factory=Bf16Buffers)

    def __post_init__(self) -> None:
        self.rounds, self.fixed_rounds = count_rounds(self.batches)
        name = self.unit.row.name
        self.label = f"{name}[{self.part}]" if self.unit.row.partitions > 1 else name

    def keep_if(self, used: Tensor) -> None:
        """Where `used` is false, put the committed codec states in place of those that the exchange left."""
        for batch, state in zip(self.batches, self.tentative or (), strict=False):
            old = batch.state
            for key, new in state.items():
                state[key] = torch.where(used, new, old[key] if key in old else torch.zeros_like(new))

    def sample_gradients(self) -> None:
        """It begins: read the gradients at the places of the samples, in the steps for which they are wanted."""
        if self.samples is not None and self.context.step in self.samples.steps:
            self.samples.before(self.unit.grads)

    def sample_averages(self) -> None:
        """The exchange is done: read the averages at the same places."""
        if self.samples is not None and self.context.step in self.samples.steps:
            averages = [None if target is None else as_real(target) for target in self.unit.targets]
            self.samples.after(averages, self.tentative or ())

    def commit(self) -> None:
        """Keep the codec states that the exchange left."""
        if self.tentative is not None:
            for batch, state in zip(self.batches, self.tentative, strict=True):
                batch.state = state
            self.tentative = None


class UnitRun:
    """A row of the plan at run time: its parameters, its launches, and the gradients in flight."""

    def __init__(self, row: Unit, slots: Sequence[Slot], links: Mapping[str, list[Link]]) -> None:
        self.row, self.slots = row, list(slots)
        self.codec = codecs.build(row.codec)
        shapes = [slot.shape for slot in slots]
        names = [slot.name for slot in slots]
        parts = launch_batches(self.codec, names, shapes, row.partitions)
        self.launches = [Launch(self, k, batches, links[row.exchange]) for k, batches in enumerate(parts)]
        self.index = min(slot.index for slot in slots)
        self.missing = 0
        """Gradients that this pass has not accumulated yet."""
        self.open_launches = 0
        """Launches that have not finished in this pass."""
        self.grads: list[Tensor] = []
        self.targets: list[Tensor | None] = []
        """The gradient objects that receive the average; None for parameters that no rank used."""
        self.takes_memory: list[bool] = []
        """For each target, whether it may be given other memory instead of a copy of the average."""
        self.shared_memory = False
        """Whether tensors that we do not know (a flat buffer, a kept view) share the memory of gradients."""
        self.touched = False
        """Whether somebody has read a gradient since the pass: views of it may have been made then."""
        self.uncommitted = False
        """Whether an exchange has left codec states that no step has committed."""
        self.stepped = False
        """Whether an optimizer has ever stepped with these gradients; if none does, they may be applied by hand."""
        self._checksums: list[Tensor] = []
        """The parameters' checksums at the end of the last pass, before the first step of an optimizer."""
        for slot in slots:
            slot.unit = self

    def reuse(self, links: Mapping[str, list[Link]]) -> "UnitRun":
        """Go into another plan whose row is identical."""
        for slot in self.slots:
            slot.unit = self
        for launch in self.launches:
            launch.links = links[self.row.exchange]
        return self

    def begin(self) -> None:
        """A backward pass starts."""
        self.missing, self.open_launches = len(self.slots), len(self.launches)
        self._drop_gradients()
        self.shared_memory = self.touched = False
        for slot in self.slots:
            slot.fired = False
        for launch in self.launches:
            launch.ready = launch.done = False

    # A step in which gradients are used commits the codec states that their exchange left. The optimizer's step calls
    # `commit` (engine/optimizer/step.py). If none ever steps, `was_applied_by_hand` decides, when the gradients are
    # dropped and when the state is saved (engine/backward.py). All other gradients that are dropped are skipped steps.

    def optimizer_steps(self) -> None:
        """An optimizer steps with these parameters: it is the one that changes them, and its step commits."""
        self.stepped, self._checksums = True, []

    def commit(self, edited: Sequence[Tensor] = (), *, broken: Tensor | None = None) -> None:
        """An optimizer steps with the averaged gradients: keep the codec states that their exchange left.

        `edited`: the gradients, if the user may have changed them (see `edited_gradients`). If all are zero now, the
        user skips the step, and the states stay as they were before it. They stay as well where `broken` is not zero:
        a fused optimizer has skipped the step (GradScaler).
        """
        self.optimizer_steps()
        facts = [torch.stack([grad.any() for grad in edited]).any()] if edited else []
        facts += [] if broken is None else [(broken == 0).all()]
        if facts and self.uncommitted:
            used = torch.stack(facts).all()
            if used.device.type != "cpu":  # the host does not wait: the device decides
                for launch in self.launches:
                    launch.keep_if(used)
            elif not used:
                self.uncommitted = False
        self.keep_states()

    def edited_gradients(self) -> list[Tensor]:
        """The gradients, if they were read or replaced since the pass and have left codec states; before the step."""
        grads = [slot.parameter.grad for slot in self.slots]
        same = all(grad is slot.grad for grad, slot in zip(grads, self.slots, strict=True))
        if not self.codec.feedback or (same and not self.touched):
            return []
        return [grad for grad in grads if grad is not None]

    def keep_states(self) -> None:
        """Keep the codec states that the last exchange left."""
        if self.uncommitted:
            self.uncommitted = False
            for launch in self.launches:
                launch.commit()

    @property
    def holds_uncommitted_state(self) -> bool:
        """Whether the last exchange left codec states that are not committed; with nothing in flight."""
        return self.uncommitted and self._has_state

    @property
    def _has_state(self) -> bool:
        kept = any(batch.state for launch in self.launches for batch in launch.batches)
        return kept or any(state for launch in self.launches for state in launch.tentative or ())

    def note_parameters(self) -> None:
        """The pass ends: note the parameters' values, to see later whether somebody has changed them."""
        self._checksums = []
        if self.codec.feedback or self._has_state:
            with NoSubclasses():
                self._checksums = [checksum(slot.parameter) for slot in self.slots]

    def was_applied_by_hand(self) -> bool:
        """Whether somebody has changed the parameters since the pass, and no optimizer has ever stepped with them."""
        with NoSubclasses():
            noted = zip(self.slots, self._checksums, strict=False)
            return any(not torch.equal(checksum(slot.parameter), before) for slot, before in noted)

    def gradients_were_dropped(self) -> bool:
        """Whether the gradients of the last pass were replaced or zeroed, so that nothing is accumulated onto them."""
        grads = [(slot.parameter.grad, slot.grad) for slot in self.slots]
        if any(now is not then for now, then in grads):
            return True
        return not any(bool(now.any()) for now, _ in grads if now is not None)

    def forget_gradients(self) -> None:
        """Nothing is in flight: drop references to gradients, so that the user can free them."""
        self._drop_gradients()
        if not self.uncommitted:
            for slot in self.slots:
                slot.grad = None

    def _drop_gradients(self) -> None:
        self.grads, self.targets, self.takes_memory = [], [], []

    def has_unknown_views(self) -> bool:
        """Whether tensors that we do not know share the memory of the gradients; with the exchange done."""
        grads = [grad for slot in self.slots if (grad := slot.parameter.grad) is not None]
        known = Counter(storage_address(t) for t in (*grads, *self.grads))
        return any(storage_users(grad) > known[storage_address(grad)] for grad in grads)

    def compute(self, place: int, product: Product) -> bool:
        """Compute the averaged gradient of a parameter in its own memory; False if it has to be copied there."""
        target = self.targets[place]
        if target is None:
            return True
        into = as_real(target)
        if into.dtype != torch.float32 or not into.is_contiguous():
            return False
        product.write(into)
        return True

    def receive(self, averages: Iterable[tuple[int, int, Tensor]], *, copy: bool = False) -> None:
        """Averaged gradients: the parameter's place in the unit, the first value, and the values from there on.

        `copy`: their memory will be used again.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for place, first, values in averages:
            target = self.targets[place]
            if target is None:
                continue
            into = as_real(target)
            whole = values.numel() == into.numel()
            if whole and not copy and self.takes_memory[place] and into is target and into.is_contiguous():
                # No copy: the gradient object takes over the memory.
                target.data = values.view(target.shape)
            elif whole:
                if into.data_ptr() != values.data_ptr():
                    pairs.append((into, values.view(into.shape)))
            elif into.is_contiguous():
                part = into.view(-1)[first : first + values.numel()]
                if part.data_ptr() != values.data_ptr():
                    pairs.append((part, values.view(-1)))
            else:
                # Not contiguous: by index, in the order of the values.
                index = torch.arange(first, first + values.numel(), device=into.device)
                into[torch.unravel_index(index, into.shape)] = values.view(-1)
        copy_all(pairs)


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself, or the view of a complex one that codecs work on, as in `plan.shape_of`."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's values read as integers, on its device: a single different bit changes it.

    >>> int(checksum(torch.tensor([1.0, 2.0])) - checksum(torch.tensor([1.0, 1.0])))
    8388608
    """
    values = as_real(tensor.detach().resolve_conj())
    return values.view(_INTS[values.dtype.itemsize]).sum(dtype=torch.int64)


def build_units(
    rows: Sequence[Unit], slots: Sequence[Slot], links: Mapping[str, list[Link]], states: States, *,
    before: Sequence[UnitRun],
) -> list[UnitRun]:  # fmt: skip
    """The units of the parameters that train now, with their codec state.

    A unit of `before` whose row is identical is reused, with the states that no step has committed yet.
    """
    by_name, old = {slot.name: slot for slot in slots}, {unit.row: unit for unit in before}
    for slot in slots:
        slot.unit = None
    units = []
    for row in rows:
        mine = [by_name[name] for name in row.parameters if by_name[name].parameter.requires_grad]
        if not mine:
            continue
        if row in old and old[row].slots == mine:
            units.append(old[row].reuse(links))
            continue
        units.append(UnitRun(row, mine, links))
        for launch in units[-1].launches:
            for batch in launch.batches:
                batch.load(states)
    return units


def gather_states(units: Iterable[UnitRun], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Tensor]]:
    """The committed codec state of all units by parameter; the slices of a parameter are joined."""
    slices: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for unit in units:
        for launch in unit.launches:
            for batch in launch.batches:
                for name, key, first, tensor in batch.dump():
                    slices.setdefault((name, key), []).append((first, tensor))
    states: dict[str, dict[str, Tensor]] = {}
    for (name, key), parts in slices.items():
        if len(parts) == 1:
            states.setdefault(name, {})[key] = parts[0][1]
        else:
            whole = torch.cat([t.reshape(-1) for _, t in sorted(parts, key=lambda part: part[0])])
            states.setdefault(name, {})[key] = whole.view(shapes[name])
    return states


def flat_state(states: States, step: int) -> dict[str, Tensor]:
    """Codec state for a checkpoint: `"<parameter>.<key>"` to copies of the tensors, and the step."""
    flat = {path: tensor.clone() for path, tensor in codecs.flatten(states).items()}
    return {**flat, STEP_KEY: torch.tensor(step)}


def read_state(
    state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], int]:
    """Codec state and step from a `flat_state`, checked against the model's parameters."""
    states = codecs.unflatten({path: tensor for path, tensor in state.items() if path != STEP_KEY})
    if odd := sorted(set(states) - set(parameters)):
        raise UsageError(f"the state has '{odd[0]}', which the model does not have: is it from another model?")
    for name, tensors in states.items():
        error, values = tensors.get("error"), shape_of(name, parameters[name]).values
        if error is not None and error.numel() != values:
            raise UsageError(
                f"the residual of '{name}' has {error.numel()} values and the parameter {values}: is it from another"
                " model?"
            )
    return states, int(state.get(STEP_KEY, torch.tensor(0)))
