"""The calls of flight-recorder dumps by process group and number, and the record of something found in them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from syncline.trace.formats.flight_read import Call, Dumps, Frame
from syncline.trace.span import rank_list

DEFAULT = "default_pg"
"""torch's description of the group of all ranks."""

_UNEVEN_INPUTS = ("all_to_all", "scatter", "gather_v", "all_gather_v", "reduce_scatter_v")
_UNEVEN_OUTPUTS = ("all_to_all", "gather", "all_gather_v", "reduce_scatter_v")


@dataclass(frozen=True)
class GroupCalls:
    """The collectives of one process group: by rank and number, the calls with it (several if they were coalesced)."""

    name: str
    description: str
    members: tuple[int, ...]
    members_known: bool
    """Whether the dumps name the ranks of the group; if not, they are the ranks that called something in it."""
    calls: Mapping[int, Mapping[int, tuple[Call, ...]]]
    first: Mapping[int, int]
    """By rank: the first number that is recorded whole; older ones may have been overwritten."""
    messages: tuple[Call, ...] = ()
    """Its sends and receives."""
    full: frozenset[int] = frozenset()
    """Ranks whose older calls were overwritten."""

    @property
    def label(self) -> str:
        """As sentences name it: `group 0 (default_pg)`."""
        return f"group {self.name} ({self.description})" if self.description else f"group {self.name}"

    @property
    def present(self) -> tuple[int, ...]:
        """The members with a dump."""
        return tuple(rank for rank in self.members if rank in self.calls)

    def last(self, rank: int) -> int:
        """The number of the last collective that a rank has called; 0 if it has called none."""
        return max(self.calls[rank], default=0)

    def latest_call(self, rank: int) -> Call | None:
        """The last collective that a rank has called."""
        return self.calls[rank][self.last(rank)][-1] if self.calls[rank] else None


@dataclass(frozen=True)
class FlightFinding:
    """Something found in dumps: `kind`, the ranks that caused it, the ranks that wait, and a sentence."""

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    group: str = ""
    sequence: int = 0
    op: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    waiting: tuple[int, ...] = ()
    frames: tuple[Frame, ...] = ()
    """Where the ranks that called it did so."""

    def as_json(self) -> dict[str, object]:
        """As `syncline trace analyze --json` prints it."""
        return {
            "kind": self.kind, "ranks": list(self.ranks), "sentence": self.sentence, "group": self.group,
            "sequence": self.sequence, "op": self.op, "sizes": [list(shape) for shape in self.sizes],
            "waiting": list(self.waiting), "frames": [str(frame) for frame in self.frames],
        }  # fmt: skip


def group_calls(dumps: Dumps) -> list[GroupCalls]:
    """All process groups of a job. Groups of one name and different ranks (of a mesh) are different groups."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    unknown: dict[str, list[int]] = defaultdict(list)
    descriptions: dict[str, str] = {}
    for rank, dump in dumps.by_rank.items():
        descriptions |= dump.descriptions
        for name in {call.group for call in dump.calls} | set(dump.members):
            if name in dump.members:
                found[name, dump.members[name]].append(rank)
            else:
                unknown[name].append(rank)
    for name, ranks in unknown.items():
        everybody = descriptions.get(name) == DEFAULT
        found[name, tuple(range(world_size(dumps))) if everybody else tuple(ranks)] += ranks
    groups = []
    for (name, members), users in sorted(found.items()):
        known = name not in unknown or descriptions.get(name) == DEFAULT
        groups.append(_group(dumps, name, members, known, users, descriptions.get(name, "")))
    return groups


def world_size(dumps: Dumps) -> int:
    """The number of ranks of the job, as far as dumps and the names of their files tell."""
    named = [rank for dump in dumps.by_rank.values() for ranks in dump.members.values() for rank in ranks]
    return max([*named, *dumps.by_rank, *dumps.unreadable]) + 1


def _group(
    dumps: Dumps, name: str, members: tuple[int, ...], known: bool, users: Sequence[int], description: str
) -> GroupCalls:
    by_rank: dict[int, dict[int, tuple[Call, ...]]] = {}
    first: dict[int, int] = {}
    messages: list[Call] = []
    for rank in sorted(set(members) & set(dumps.by_rank)):
        mine: dict[int, list[Call]] = defaultdict(list)
        for call in dumps.by_rank[rank].calls if rank in users else ():
            if call.group != name:
                continue
            if call.p2p:
                messages.append(call)
            else:
                mine[call.sequence].append(call)
        by_rank[rank] = {number: tuple(calls) for number, calls in sorted(mine.items())}
        # The oldest number that is left of a full buffer may lack some of its coalesced calls.
        first[rank] = min(mine, default=0) + dumps.by_rank[rank].full
    full = frozenset(rank for rank in by_rank if dumps.by_rank[rank].full)
    return GroupCalls(name, description, members, known, by_rank, first, tuple(messages), full)


def signature(calls: Iterable[Call]) -> tuple[object, ...]:
    """What must be the same on all ranks of a collective: operations, numbers of elements, types."""
    rows: list[object] = []
    for call in calls:
        op = call.op.lstrip("_")
        inputs = () if op.startswith(_UNEVEN_INPUTS) else tuple(map(math.prod, call.inputs))
        outputs = () if op.startswith(_UNEVEN_OUTPUTS) else tuple(map(math.prod, call.outputs))
        rows.append((op, inputs, outputs, call.dtypes[:1] if inputs else ()))
    return tuple(rows)


def describe(call: Call) -> str:
    """A call as sentences name it: `all_reduce of 4,096 Float elements`."""
    if not call.elements:
        return call.op
    return f"{call.op} of {call.elements:,} {call.dtypes[0] + ' ' if call.dtypes else ''}elements"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_list(ranks)}"


def verb(ranks: Sequence[int], one: str, several: str) -> str:
    """The form of a verb that fits the number of ranks."""
    return one if len(ranks) == 1 else several


def place(call: Call | None) -> str:
    """` at train.py:42 (step)`, or nothing where the stack is unknown."""
    frames = call.user_frames if call is not None else ()
    return f" at {frames[0]}" if frames else ""
