"""The default plan, without measurements: grouping of parameters, number of parts, and an estimated launch order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from syncline import codecs, exchange
from syncline.errors import UsageError
from syncline.plan import check
from syncline.plan.launch_order import greedy_order
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit

# Each message costs a latency, a fraction of a millisecond; 1 MiB takes 9 ms on a 1 Gbit/s link, so latency hardly
# counts from this size on. Larger groups would make the first layers, which are needed first, wait for deeper ones.
GROUP_BYTES = 1 << 20

# A part that is being sent cannot be interrupted: an urgent unit waits at most for 4 MiB, 35 ms at 1 Gbit/s.
PART_BYTES = 4 << 20

# A small module between two large layers (a BatchNorm, a LayerNorm) gets no launch of its own if it is smaller than
# 1 / 16 of a group. It joins the layer before it: that layer's gradient is ready later, its parameters needed earlier.
_SMALL_SHARE = 16


@dataclass(frozen=True)
class _Group:
    """Parameters of one or more modules in a row; `first` and `last` are the modules' names."""

    first: str
    last: str
    members: tuple[Shape, ...]

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype

    def __add__(self, other: "_Group") -> "_Group":
        return _Group(self.first, other.last, self.members + other.members)


def default_plan(
    shapes: Sequence[Shape],
    *,
    compress: str | None = None,
    exchange: str | None = None,
    group_bytes: int = GROUP_BYTES,
    part_bytes: int = PART_BYTES,
    world: int = 2,
) -> Plan:
    """A plan for parameters in forward order: one codec and exchange for all, small modules grouped, large units cut.

    The order is `greedy_order` on an estimate: the backward pass takes as long as the exchange, and every unit takes
    an equal share of it. The planner replaces the estimate with measurements.
    """
    check.trainable(shapes)
    if group_bytes < 0 or part_bytes < 1:
        raise UsageError(f"group_bytes={group_bytes}, part_bytes={part_bytes}: use 0 or more, and 1 or more")
    codec = codecs.build("none" if compress is None else compress)
    carrier = _carrier(codec, exchange)
    groups = _grouped(_modules(shapes), group_bytes)
    wire = [_wire_bytes(codec, group) for group in groups]
    parts = [_parts(codec, group, size, part_bytes) for group, size in zip(groups, wire, strict=True)]
    names = _unique(g.first if g.first == g.last else f"{g.first}..{g.last}" for g in groups)
    units = tuple(
        Unit(name, tuple(member.name for member in group.members), codec.text, carrier, count)
        for name, group, count in zip(names, groups, parts, strict=True)
    )
    plan = Plan(units, _ordered(units, wire))
    plan.check(shapes, world=world)
    return plan


def _carrier(codec: codecs.Codec, name: str | None) -> str:
    return str(exchange.check(codec, exchange.legal(codec)[0] if name is None else name))


def _modules(shapes: Sequence[Shape]) -> list[_Group]:
    """One group per module. A weight and its bias belong together: the forward pass needs both."""
    modules: dict[tuple[str, torch.dtype], list[Shape]] = {}
    for shape in shapes:
        modules.setdefault((shape.name.rpartition(".")[0], shape.dtype), []).append(shape)
    return [
        _Group(module or members[0].name, module or members[-1].name, tuple(members))
        for (module, _), members in modules.items()
    ]


def _grouped(modules: Sequence[_Group], size: int) -> list[_Group]:
    """Join small neighbours until a group has `size` bytes; very small groups join the group before them."""
    groups: list[_Group] = []
    is_open = False
    for module in modules:
        if is_open and module.nbytes < size and module.dtype == groups[-1].dtype:
            groups[-1] += module
        else:
            groups.append(module)
        is_open = groups[-1].nbytes < size
    whole = groups[:1]
    for group in groups[1:]:
        if group.nbytes * _SMALL_SHARE < size and group.dtype == whole[-1].dtype:
            whole[-1] += group
        else:
            whole.append(group)
    return whole


def _wire_bytes(codec: codecs.Codec, group: _Group) -> float:
    members = group.members
    if codec.view == "flat":
        return codec.wire_bytes((sum(member.values for member in members),), group.dtype)
    batches = codecs.batches(codec, [m.name for m in members], [m.shape for m in members])
    return sum(codec.wire_bytes(batch.shape, group.dtype, packed=True) for batch in batches)


def _parts(codec: codecs.Codec, group: _Group, wire: float, part_bytes: int) -> int:
    if codec.view == "matrix":  # a factorisation needs the whole matrix
        return 1
    values = sum(member.values for member in group.members)
    return max(1, min(ceil(wire / part_bytes), values))


def _ordered(units: Sequence[Unit], wire: Sequence[float]) -> tuple[tuple[str, int], ...]:
    parts = [(at, part) for at, unit in enumerate(units) for part in range(unit.partitions)]
    share = sum(wire) / len(units)
    order = greedy_order(
        ready=[(len(units) - at) * share for at, _ in parts],
        wire=[wire[at] / units[at].partitions for at, _ in parts],
        need=[at for at, _ in parts],
    )
    return tuple((units[parts[i][0]].name, parts[i][1]) for i in order)


def _unique(names: Iterable[str]) -> list[str]:
    """Make names unique: a module of two dtypes becomes two units, and a parameter may have a module's name."""
    wanted = list(names)
    taken: list[str] = []
    for name in wanted:
        free = (f"{name}#{n}" for n in range(2, len(wanted) + 3))
        taken.append(name if name not in taken else next(f for f in free if f not in taken and f not in wanted))
    return taken
