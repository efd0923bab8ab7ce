"""Notes of several ranks as few sentences: those that differ only in their numbers become one."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?![\w.]*[A-Za-z_])")
_RANK = re.compile(r"\brank $")


def combined(notes: Iterable[str]) -> list[str]:
    """The notes in their order; several that differ only in numbers are one note with ranges.

    >>> combined(["rank 0: 3 spans are left out", "rank 1: 5 spans are left out", "clocks agree"])
    ['ranks 0 and 1: 3 to 5 spans are left out', 'clocks agree']
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for note in dict.fromkeys(notes):
        groups[_NUMBER.sub("#", note)].append(note)
    return [_one(of) for of in groups.values()]


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> rank_list([3]), rank_list([0, 1]), rank_list(range(8)), rank_list([0, 2, 5])
    ('rank 3', 'ranks 0 and 1', 'ranks 0 to 7', 'ranks 0, 2 and 5')
    """
    known = sorted(set(ranks))
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > 2 and known[-1] - known[0] == len(known) - 1:
        return f"ranks {known[0]} to {known[-1]}"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def _one(notes: Sequence[str]) -> str:
    if len(notes) == 1:
        return notes[0]
    columns = list(zip(*(_NUMBER.findall(note) for note in notes), strict=True))
    words, at = "", 0
    for match, column in zip(_NUMBER.finditer(notes[0]), columns, strict=True):
        words += notes[0][at : match.start()]
        at = match.end()
        if len(set(column)) == 1:
            words += column[0]
        elif _RANK.search(words):
            words = _RANK.sub("", words) + rank_list(int(number.replace(",", "")) for number in column)
        else:
            ordered = sorted(column, key=lambda number: float(number.replace(",", "")))
            words += f"{ordered[0]} to {ordered[-1]}"
    return words + notes[0][at:]
