"""Colours of strategies: a name has the same colour on every page, as far as no other name on the page has it."""

import re
import zlib
from collections.abc import Sequence

COLORS = 10
"""Colours in the palette (`assets/css/base.css`). A number from ten on is a colour again, with a dashed line."""

_FIXED = {
    "compute": 9, "single": 9, "local": 7, "gather-scatter": 3, "all-reduce": 2, "ring": 5, "server": 8,
    "ddp": 4, "ddp-bf16": 1, "ddp-fp16": 7, "ddp-powersgd": 8,
    "syncline": 0, "syncline(auto)": 6, "syncline(bf16)": 5,
}  # fmt: skip
"""The usual strategies, chosen so that those of one recipe differ."""


def palette(names: Sequence[str]) -> list[int]:
    """The colour of each name as a number in the palette: its own if it is free, else the next free one.

    >>> palette(["syncline", "ddp"]), palette(["ddp", "single", "syncline"])
    ([0, 4], [4, 9, 0])
    """
    chosen: dict[int, int] = {}
    # The usual names choose first, and those without options: others must not take their colours.
    bases = [_base(name) for name in names]
    for place in sorted(
        range(len(names)), key=lambda place: (bases[place] not in _FIXED, names[place] != bases[place])
    ):
        own, dashes = _own(names[place]), COLORS * (len(chosen) // COLORS)
        taken = set(chosen.values())
        chosen[place] = next(c for i in range(COLORS) if (c := dashes + (own + i) % COLORS) not in taken)
    return [chosen[place] for place in range(len(names))]


def _base(name: str) -> str:
    """The name without a world size, a number of equal runs, or options of a rival: `ddp x4`, `ddp(bucket_mb=5)`."""
    plain = re.sub(r" (x\d+|#\d+)", "", name)
    family = plain.partition("(")[0]
    return plain if family == "syncline" else family


def _own(name: str) -> int:
    base = _base(name)
    return _FIXED.get(base, zlib.crc32(base.encode(errors="replace")) % COLORS)
