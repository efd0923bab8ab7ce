"""The plan: units in forward order, the launch order, a hash, and a readable table."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from syncline.plan import check
from syncline.plan.unit import Fact, Part, Shape, Unit

_SHOWN = 3
_TITLES = ("launch", "unit", "parameters", "codec", "exchange", "partitions")


@dataclass(frozen=True)
class Plan:
    """What is done to each gradient: units in forward order, and the order in which all ranks launch their parts."""

    units: tuple[Unit, ...]
    order: tuple[Part, ...]
    about: Mapping[str, Fact] = field(default_factory=dict, hash=False)
    """Free facts, such as the predicted step time; not part of the hash."""
    executor: str = "overlap"
    """`overlap`: launches are hidden behind the backward pass and the next forward pass. `reducer`: torch's C++ reducer
    sends each unit as one bucket during the backward pass, as DDP does."""

    @property
    def hash(self) -> str:
        """Sixteen hex digits of units and order: the same in every process, so that ranks can compare their plans."""
        rows = [[u.name, list(u.parameters), u.codec, u.exchange, u.partitions] for u in self.units]
        executor = [] if self.executor == "overlap" else [self.executor]
        content = ["syncline plan 1", rows, [list(part) for part in self.order], *executor]
        text = json.dumps(content, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    def check(self, shapes: Sequence[Shape], *, world: int = 2) -> None:
        """Raise a `UsageError` unless this plan can train a model of these parameters on `world` ranks."""
        check.table(self.units, self.order)
        check.executor(self.executor, self.units)
        check.model(self.units, shapes, world=world)

    def table(self) -> str:
        """The plan as aligned text: one row per unit in forward order, with its launch positions counted from 1."""
        at: dict[str, list[int]] = {unit.name: [] for unit in self.units}
        for position, (name, _) in enumerate(self.order, start=1):
            at.setdefault(name, []).append(position)
        rows = [_TITLES] + [
            (_runs(at[u.name]), _plain(u.name), _some(u.parameters), u.codec, u.exchange, str(u.partitions))
            for u in self.units
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        facts = [f"{_plain(key)}: {_plain(str(self.about[key]))}" for key in sorted(self.about)]
        size = f"{len(self.units)} units, {len(self.order)} launches"
        executor = f", executor {self.executor}" if self.executor != "overlap" else ""
        return "\n".join([*lines, f"plan {self.hash}: {size}{executor}", *facts])


def _runs(positions: Sequence[int]) -> str:
    """`[1, 2, 3, 7]` as `1-3,7`; of many runs, only the first and the last."""
    runs = [[p for _, p in run] for _, run in groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(texts if len(texts) <= _SHOWN else [texts[0], "...", texts[-1]])


def _some(names: Sequence[str]) -> str:
    shown = [_plain(name) for name in names]
    return ", ".join(shown if len(shown) <= _SHOWN else [shown[0], "...", shown[-1], f"{len(shown)} in all"])


def _plain(text: str) -> str:
    """The text without characters, such as line breaks, that would break the table."""
    return text if text.isprintable() else repr(text)[1:-1]
