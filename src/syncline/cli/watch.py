"""What a session looks like while it runs: a bar and a table of phases on a terminal, plain lines elsewhere."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from syncline.cli.livetable import Phases
from syncline.train.session.session import Planned


def _label(run: Planned) -> str:
    servers = f" + {run.servers} server{'s' * (run.servers > 1)}" if run.servers else ""
    return f"{run.strategy} ({run.workers} rank{'s' * (run.workers > 1)}{servers})"


def _outcome(result: dict[str, Any], *, short: bool = False) -> str:
    if result["status"] == "crashed":
        return f"crashed on rank {result['error']['rank']}: {result['error']['summary']}"
    losses, speed = result["loss"], "" if short else f"{result['samples_per_s']:.1f} samples/s, "
    return f"{result['step_ms']['median']:.1f} ms a step, {speed}loss {losses[-1]:.4f}"


class Lines:
    """Plain lines: a run's start and end, and every twentieth step."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.phases = Phases()

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def begin(self, run: Planned) -> None:
        self.phases = Phases()
        self.console.print(f"{_label(run)} ...", markup=False, highlight=False, soft_wrap=True)

    def step(self, message: dict[str, Any]) -> None:
        number = message["step"] + 1
        self.phases.add(message)
        if number == 1 or number % 20 == 0:
            text = f"  step {number}: loss {message['loss']:.4f}, {message['step_ms']:.1f} ms"
            if number > 1 and (words := self.phases.words(self.console.width - len(text) - 2)):
                text = f"{text}, {words}"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self, run: Planned, result: dict[str, Any]) -> None:
        self.console.print(f"{_label(run)}: {_outcome(result)}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to put away."""


class Bars:
    """One bar a run, and below it the phases of the last steps of the run under way."""

    def __init__(self, console: Console) -> None:
        self.console = console
        whole = [Column(no_wrap=True, min_width=7) for _ in range(2)]  # not cut short for the text at the end
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(table_column=whole[0]))
        left = TimeRemainingColumn(table_column=whole[1])
        self.progress = Progress(*columns, left, TextColumn("{task.fields[state]}"), console=console)
        self.task: TaskID | None = None
        self.phases: Phases | None = None
        self.live = Live(console=console, get_renderable=self._shown, refresh_per_second=4)
        self.live.start()

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]note:[/] {escape(text)}")

    def begin(self, run: Planned) -> None:
        total = run.train.steps * run.train.epochs or None
        self.task = self.progress.add_task(escape(_label(run)), total=total, state="starting")
        self.phases = Phases()

    def step(self, message: dict[str, Any]) -> None:
        assert self.task is not None
        assert self.phases is not None
        self.phases.add(message)
        state = f"loss {message['loss']:.3f}, {message['step_ms']:.0f} ms"
        self.progress.update(self.task, completed=message["step"] + 1, state=state)

    def end(self, run: Planned, result: dict[str, Any]) -> None:
        assert self.task is not None
        self.phases = None
        colour = "red" if result["status"] == "crashed" else "green"
        self.progress.update(self.task, state=f"[{colour}]{escape(_outcome(result, short=True))}[/]")

    def close(self) -> None:
        """Leave the last state of the bars on the screen; the table goes, for the report says more."""
        self.phases = None
        self.live.stop()

    def _shown(self) -> RenderableType:
        phases, colours = self.phases, self.console.color_system is not None
        table = None if phases is None else phases.table(width=self.console.width, colours=colours)
        return Group(self.progress.get_renderable(), *([table] if table else []))


def watcher(console: Console) -> Lines | Bars:
    """The one that fits where the output goes."""
    return Bars(console) if console.is_terminal else Lines(console)
