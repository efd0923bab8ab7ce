"""Progress of a running session: bars and a table of phases on a terminal, plain lines elsewhere."""

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from syncline.cli.output import say
from syncline.train.rank.step_log import LIVE_PHASES
from syncline.train.rank.worker import RunSpec

STEPS = 20
"""The table shows the mean of this many steps of each rank."""
_MANY_RANKS = 8  # with more ranks, the table shows their mean and the rank that waits least
_COLOURS = ("yellow", "green", "blue", "magenta", "red", "cyan", "bright_black")
_LETTERS = ("d", "f", "b", "e", "x", "u", ".")  # for terminals without colours
_WAIT = "exchange and wait"
_FIRST = "ms per step"
_LONGEST_BAR, _SHORTEST_BAR = 48, 5  # characters
_MOST_SILENT_S = 30.0
_SMALLEST_SHARE = 0.05  # smaller shares are left out of a line


class Notes:
    """Prints notes and nothing else."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        say(f"note: {text}", self.console)

    def begin(self, run: RunSpec) -> None: ...

    def step(self, message: dict[str, Any]) -> None: ...

    def log(self, line: str) -> None:
        say(line, self.console)

    def end(self, run: RunSpec, result: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Lines(Notes):
    """Plain lines: the start and the end of a run, every twentieth step, and a step every half a minute."""

    def begin(self, run: RunSpec) -> None:
        self.phases = Phases()
        self.said = time.monotonic()
        say(f"{_label(run)} ...", self.console)

    def step(self, message: dict[str, Any]) -> None:
        number = message["step"] + 1
        self.phases.add(message)
        if number == 1 or number % 20 == 0 or time.monotonic() - self.said > _MOST_SILENT_S:
            self.said = time.monotonic()
            text = f"  step {number}: loss {message['loss']:.4f}, {message['step_ms']:.1f} ms"
            if number > 1 and (words := self.phases.words(self.console.width - len(text) - 2)):
                text = f"{text}, {words}"
            say(text, self.console)

    def end(self, run: RunSpec, result: dict[str, Any]) -> None:
        say(f"{_label(run)}: {_outcome(result)}", self.console)


class Bars:
    """One progress bar per run, and below it the phases of the current run's last steps."""

    def __init__(self, console: Console) -> None:
        self.console = console
        whole = [Column(no_wrap=True, min_width=7) for _ in range(2)]  # never cut to make room for the text at the end
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(table_column=whole[0]))
        left = TimeRemainingColumn(table_column=whole[1])
        self.progress = Progress(*columns, left, TextColumn("{task.fields[state]}"), console=console)
        self.task: TaskID | None = None
        self.phases: Phases | None = None
        self.live = Live(console=console, get_renderable=self._shown, refresh_per_second=4)
        self.live.start()

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]note:[/] {escape(text)}")

    def log(self, line: str) -> None:
        self.console.print(escape(line))

    def begin(self, run: RunSpec) -> None:
        total = run.train.steps * run.train.epochs or None
        self.task = self.progress.add_task(escape(_label(run)), total=total, state="starting")
        self.phases = Phases()

    def step(self, message: dict[str, Any]) -> None:
        assert self.task is not None
        assert self.phases is not None
        self.phases.add(message)
        state = f"loss {message['loss']:.3f}, {message['step_ms']:.0f} ms"
        self.progress.update(self.task, completed=message["step"] + 1, state=state)

    def end(self, run: RunSpec, result: dict[str, Any]) -> None:
        assert self.task is not None
        self.phases = None
        colour = "red" if result["status"] == "crashed" else "green"
        self.progress.update(self.task, state=f"[{colour}]{escape(_outcome(result, short=True))}[/]")

    def close(self) -> None:
        """Leave the bars on the screen. The table goes: the report says more."""
        self.phases = None
        self.live.stop()

    def _shown(self) -> RenderableType:
        phases, colours = self.phases, self.console.color_system is not None
        table = None if phases is None else phases.table(width=self.console.width, colours=colours)
        return Group(self.progress.get_renderable(), *([table] if table else []))


def watcher(console: Console, *, quiet: bool = False) -> Notes | Bars:
    """Bars on a terminal, plain lines elsewhere; with `quiet` only notes."""
    if quiet:
        return Notes(console)
    return Bars(console) if console.is_terminal else Lines(console)


class Phases:
    """The time of each phase in the last steps of each rank."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[Mapping[str, float]]] = {}
        self._lock = threading.Lock()  # rich draws the terminal in its own thread

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a progress message: of all ranks, or of this rank alone under a launcher."""
        ranks = message.get("ranks")
        if ranks is None:
            ranks = {0: message["phases"]} if message.get("phases") else {}
        with self._lock:
            for rank, phases in ranks.items():
                self._rows.setdefault(rank, deque(maxlen=STEPS)).append(phases)

    def means(self) -> dict[int, dict[str, float]]:
        """Mean milliseconds per step of each phase, by rank."""
        with self._lock:
            return {rank: _mean(rows) for rank, rows in sorted(self._rows.items())}

    def words(self, width: int) -> str:
        """The largest phases as shares of a step, as many as fit: `backward 38%, exchange and wait 31%`."""
        mean = _mean(self.means().values())
        whole = sum(mean.values())
        shares = sorted(((ms / whole, phase) for phase, ms in mean.items() if whole), reverse=True)
        text = ""
        for share, phase in shares[:3]:
            more = f"{text}, {phase} {share:.0%}" if text else f"{phase} {share:.0%}"
            if share < _SMALLEST_SHARE or len(more) > width:
                break
            text = more
        return text

    def table(self, *, width: int, colours: bool) -> Table | None:
        """One row per rank: a column for each phase, and a bar as long as the step. None before the first step."""
        means = self.means()
        if not means:
            return None
        rows = _table_rows(means)
        shown = [n for n, phase in enumerate(LIVE_PHASES) if any(f"{row[phase]:.1f}" != "0.0" for _, row in rows)]
        while len(shown) > 1 and _width_without_bar(rows, shown, colours) > width:
            shown.remove(min(shown, key=lambda n: sum(row[LIVE_PHASES[n]] for _, row in rows)))
        room = min(_LONGEST_BAR, width - _width_without_bar(rows, shown, colours) - 1)
        made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        made.add_column(_FIRST, no_wrap=True)
        for head in (Text("step"), *(_head(n, colours) for n in shown)):
            made.add_column(head, justify="right", no_wrap=True)
        if room >= _SHORTEST_BAR:
            made.add_column("", no_wrap=True)
        longest = max(sum(row.values()) for _, row in rows) or 1.0
        for name, row in rows:
            total = sum(row.values())
            bar = [_bar(row, shown, round(room * total / longest), colours)] if room >= _SHORTEST_BAR else []
            made.add_row(name, f"{total:.1f}", *(f"{row[LIVE_PHASES[n]]:.1f}" for n in shown), *bar)
        return made


def _width_without_bar(rows: Sequence[tuple[str, Mapping[str, float]]], shown: Sequence[int], colours: bool) -> int:
    """The width of all columns but the bar, with a blank after each."""
    width = 1 + max([len(_FIRST), *(len(name) for name, _ in rows)])
    width += 1 + max([len("step"), *(len(f"{sum(row.values()):.1f}") for _, row in rows)])
    for n in shown:
        head = [len(line) for line in _head(n, colours).plain.split("\n")]
        width += 1 + max(head + [len(f"{row[LIVE_PHASES[n]]:.1f}") for _, row in rows])
    return width


def _table_rows(means: Mapping[int, dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    if len(means) <= _MANY_RANKS:
        return [(f"rank {rank}", row) for rank, row in means.items()]
    least = min(means, key=lambda rank: means[rank][_WAIT])
    return [("mean", _mean(means.values())), (f"rank {least} waits least", means[least])]


def _mean(rows: Collection[Mapping[str, float]]) -> dict[str, float]:
    return {phase: sum(row[phase] for row in rows) / max(1, len(rows)) for phase in LIVE_PHASES}


def _head(n: int, colours: bool) -> Text:
    name = LIVE_PHASES[n].replace("exchange and", "exchange\nand")
    return Text(name, style=_COLOURS[n]) if colours else Text(f"{name} {_LETTERS[n]}")


def _bar(row: Mapping[str, float], shown: Sequence[int], length: int, colours: bool) -> Text:
    """A bar in which each phase is as long as its share; rounding errors carry over to the next phase."""
    whole = sum(row.values()) or 1.0
    bar, done, at = Text(), 0.0, 0
    for n in shown:
        done += row[LIVE_PHASES[n]] / whole * length
        count = round(done) - at
        at += count
        bar.append(("█" if colours else _LETTERS[n]) * count, style=_COLOURS[n] if colours else "")
    return bar


def _label(run: RunSpec) -> str:
    servers = f" + {run.servers} server{'s' * (run.servers > 1)}" if run.servers else ""
    return f"{run.strategy} ({run.workers} rank{'s' * (run.workers > 1)}{servers})"


def _outcome(result: dict[str, Any], *, short: bool = False) -> str:
    if result["status"] == "crashed":
        return f"crashed on rank {result['error']['rank']}: {result['error']['summary']}"
    losses, speed = result["loss"], "" if short else f"{result['samples_per_s']:.1f} samples/s, "
    return f"{result['step_ms']['median']:.1f} ms per step, {speed}loss {losses[-1]:.4f}"
