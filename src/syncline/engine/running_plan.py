"""The plan in use: its links, its units of the parameters that train now, their launch order and codec state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline import codecs, exchange
from syncline.engine.launch.batches import CodecBatch, count_rounds, launch_batches
from syncline.engine.launch.units import Launch, Slot, UnitRun, build_units, gather_states
from syncline.engine.process_groups import Groups
from syncline.exchange import Link
from syncline.plan import Plan, Shape


class RunningPlan:
    """What the engine runs in a step. Changed only between steps, by the training thread."""

    def __init__(self, plan: Plan, shapes: Sequence[Shape], slots: Sequence[Slot], groups: Groups) -> None:
        self.plan = plan
        self._shapes, self._slots, self._groups = shapes, slots, groups
        self.links: dict[str, list[Link]] = {}
        self.trainers = groups.world
        """How many ranks (the first ones) train; the others are dedicated servers."""
        self.units: list[UnitRun] = []
        self.order: list[Launch] = []
        self.trained: list[bool] = []
        """For each parameter, whether it trains in these units."""
        self._unused_states: dict[str, dict[str, Tensor]] = {}
        """Codec state of parameters that are in no unit (frozen ones)."""

    def connect(self) -> None:
        """Have process groups and links for all rounds of the plan; all ranks call this alike."""
        # One group more than rounds, for the buffers: within a group, all ranks issue collectives in one order.
        self._groups.open(_rounds(self.plan, self._shapes) + 1)
        # In one order on every rank: with NCCL, connecting communicates.
        self.links = {
            text: [exchange.connect(text, group) for group in self._groups.rounds[:-1]]
            for text in sorted({row.exchange for row in self.plan.units})
        }
        # The same for all units: the plan was checked.
        self.trainers = next(iter(self.links.values()))[0].position.workers

    def build(self) -> None:
        """Make units of the parameters that train now; codec state is kept."""
        states = self.states()
        self.trained = [slot.parameter.requires_grad for slot in self._slots]
        self.units = build_units(self.plan.units, self._slots, self.links, states, before=self.units)
        in_units = {slot.name for unit in self.units for slot in unit.slots}
        self._unused_states = {name: tensors for name, tensors in states.items() if name not in in_units}
        # A unit with frozen parameters may have fewer parts than its row.
        launches = {(unit.row.name, launch.part): launch for unit in self.units for launch in unit.launches}
        self.order = [launches[part] for part in self.plan.order if part in launches]

    @property
    def owes_residuals(self) -> bool:
        """Whether a codec of another plan has left residuals that are to be added to the next gradient."""
        return bool(self._with_residuals())

    def forget_sent_residuals(self) -> None:
        """Drop residuals if all are zero on every rank; all ranks call it, since all of them have some.

        On a GPU a codec without feedback leaves zeros where it has added a residual: only the device knows whether it
        did, as the step may have been broken.
        """
        batches = self._with_residuals()
        left = torch.stack([batch.state["error"].any() for batch in batches]).any().cpu()
        if not self._groups.gather(left.long().view(1)).any():
            for batch in batches:
                batch.state = {key: tensor for key, tensor in batch.state.items() if key != "error"}

    def _with_residuals(self) -> list[CodecBatch]:
        batches = [batch for unit in self.units for launch in unit.launches for batch in launch.batches]
        return [batch for batch in batches if "error" in batch.state]

    def load(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Replace all codec state."""
        self._unused_states, self.units = states, []
        if self.links:
            self.build()

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The committed codec state of all parameters, by name and in the model's order, whatever the plan is."""
        found = {**self._unused_states, **gather_states(self.units, {s.name: s.shape for s in self._shapes})}
        return {s.name: found[s.name] for s in self._shapes if s.name in found}


def _rounds(plan: Plan, shapes: Sequence[Shape]) -> int:
    """The largest number of communication rounds that a launch of this plan has."""
    by_name = {s.name: s.shape for s in shapes}
    rounds = 1
    for row in plan.units:
        sizes = [by_name[name] for name in row.parameters]
        parts = launch_batches(codecs.build(row.codec), row.parameters, sizes, row.partitions)
        rounds = max(rounds, *(count_rounds(batches)[0] for batches in parts))
    return rounds
