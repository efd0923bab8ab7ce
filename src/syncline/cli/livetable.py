"""The phases of the last steps as a table for a terminal, and in a few words for a line."""

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from syncline.train.rank.live import PHASES

STEPS = 20
"""Steps of each rank whose mean is shown."""
_MANY = 8
"""With more ranks, the mean and the one that waits least."""
_COLOURS = ("yellow", "green", "blue", "magenta", "red", "cyan", "bright_black")
_LETTERS = ("d", "f", "b", "e", "x", "u", ".")  # where there are no colours
_WAIT = "exchange and wait"
_FIRST = "ms a step"
_BAR, _LEAST = 48, 5  # the longest bar, and the shortest that says anything
_SHOWN = 0.05  # a smaller share is not named in a line


class Phases:
    """The last steps' phases of each rank of a run."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[Mapping[str, float]]] = {}
        self._lock = threading.Lock()  # a terminal is drawn by a thread of its own

    def add(self, message: Mapping[str, Any]) -> None:
        """Take what a progress message tells: of all ranks, or under a launcher of its own."""
        ranks = message.get("ranks")
        if ranks is None:
            ranks = {0: message["phases"]} if message.get("phases") else {}
        with self._lock:
            for rank, phases in ranks.items():
                self._rows.setdefault(rank, deque(maxlen=STEPS)).append(phases)

    def means(self) -> dict[int, dict[str, float]]:
        """By rank, milliseconds a step."""
        with self._lock:
            return {rank: _mean(rows) for rank, rows in sorted(self._rows.items())}

    def words(self, width: int) -> str:
        """The largest shares of the ranks' mean, as many as fit: `backward 38%, exchange and wait 31%`."""
        mean = _mean(self.means().values())
        whole = sum(mean.values())
        shares = sorted(((ms / whole, phase) for phase, ms in mean.items() if whole), reverse=True)
        text = ""
        for share, phase in shares[:3]:
            more = f"{text}, {phase} {share:.0%}" if text else f"{phase} {share:.0%}"
            if share < _SHOWN or len(more) > width:
                break
            text = more
        return text

    def table(self, *, width: int, colours: bool) -> Table | None:
        """A row a rank, a column a phase, and a bar as long as the step; nothing before the first step."""
        means = self.means()
        if not means:
            return None
        rows = _chosen(means)
        shown = [n for n, phase in enumerate(PHASES) if any(f"{row[phase]:.1f}" != "0.0" for _, row in rows)]
        while len(shown) > 1 and _used(rows, shown, colours) > width:
            shown.remove(min(shown, key=lambda n: sum(row[PHASES[n]] for _, row in rows)))
        room = min(_BAR, width - _used(rows, shown, colours) - 1)
        made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        made.add_column(_FIRST, no_wrap=True)
        for head in (Text("step"), *(_head(n, colours) for n in shown)):
            made.add_column(head, justify="right", no_wrap=True)
        if room >= _LEAST:
            made.add_column("", no_wrap=True)
        longest = max(sum(row.values()) for _, row in rows) or 1.0
        for name, row in rows:
            total = sum(row.values())
            bar = [_bar(row, shown, round(room * total / longest), colours)] if room >= _LEAST else []
            made.add_row(name, f"{total:.1f}", *(f"{row[PHASES[n]]:.1f}" for n in shown), *bar)
        return made


def _used(rows: Sequence[tuple[str, Mapping[str, float]]], shown: Sequence[int], colours: bool) -> int:
    """How wide the columns without the bar are, with a blank after each."""
    width = 1 + max([len(_FIRST), *(len(name) for name, _ in rows)])
    width += 1 + max([len("step"), *(len(f"{sum(row.values()):.1f}") for _, row in rows)])
    for n in shown:
        head = [len(line) for line in _head(n, colours).plain.split("\n")]
        width += 1 + max(head + [len(f"{row[PHASES[n]]:.1f}") for _, row in rows])
    return width


def _chosen(means: Mapping[int, dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    if len(means) <= _MANY:
        return [(f"rank {rank}", row) for rank, row in means.items()]
    least = min(means, key=lambda rank: means[rank][_WAIT])
    return [("mean", _mean(means.values())), (f"rank {least} waits least", means[least])]


def _mean(rows: Collection[Mapping[str, float]]) -> dict[str, float]:
    return {phase: sum(row[phase] for row in rows) / max(1, len(rows)) for phase in PHASES}


def _head(n: int, colours: bool) -> Text:
    name = PHASES[n].replace("exchange and", "exchange\nand")
    return Text(name, style=_COLOURS[n]) if colours else Text(f"{name} {_LETTERS[n]}")


def _bar(row: Mapping[str, float], shown: Sequence[int], length: int, colours: bool) -> Text:
    """Each phase as long as its share; what is rounded off goes from one to the next."""
    whole = sum(row.values()) or 1.0
    bar, done, at = Text(), 0.0, 0
    for n in shown:
        done += row[PHASES[n]] / whole * length
        count = round(done) - at
        at += count
        bar.append(("█" if colours else _LETTERS[n]) * count, style=_COLOURS[n] if colours else "")
    return bar
