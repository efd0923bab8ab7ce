"""Notes of several ranks as few sentences: those that differ only in their numbers become one."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from syncline.trace.span import rank_list

_NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?![\w.]*[A-Za-z_])")
_COUNTED = re.compile(r"# (\w+?)(?:ies|y|es|s)?\b")  # a noun, of one or of several
_RANK = re.compile(r"\brank $")


def combined(notes: Iterable[str]) -> list[str]:
    """The notes in their order; several that differ only in numbers are one note with ranges.

    >>> combined(["rank 0: 1 span: left out", "rank 1: 5 spans: left out", "clocks agree"])
    ['ranks 0-1: 1 to 5 spans: left out', 'clocks agree']
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for note in dict.fromkeys(notes):
        groups[_COUNTED.sub(r"# \1", _NUMBER.sub("#", note))].append(note)
    return [_one(of) for of in groups.values()]


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> named_ranks([3]), named_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {rank_list(ranks)}"


def _one(notes: Sequence[str]) -> str:
    if len(notes) == 1:
        return notes[0]
    columns = list(zip(*(_NUMBER.findall(note) for note in notes), strict=True))
    words, at, longest = "", 0, max(notes, key=len)
    for match, column in zip(_NUMBER.finditer(longest), columns, strict=True):
        words += longest[at : match.start()]
        at = match.end()
        if len(set(column)) == 1:
            words += column[0]
        elif _RANK.search(words):
            words = _RANK.sub("", words) + named_ranks([int(number.replace(",", "")) for number in column])
        else:
            ordered = sorted(column, key=lambda number: float(number.replace(",", "")))
            words += f"{ordered[0]} to {ordered[-1]}"
    return words + longest[at:]
