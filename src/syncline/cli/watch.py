"""What a session looks like while it runs: a progress bar on a terminal, plain lines elsewhere."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from syncline.train.session import Planned


def _label(run: Planned) -> str:
    servers = f" + {run.servers} server{'s' * (run.servers > 1)}" if run.servers else ""
    return f"{run.strategy} ({run.workers} rank{'s' * (run.workers > 1)}{servers})"


def _outcome(result: dict[str, Any]) -> str:
    if result["status"] == "crashed":
        return f"crashed on rank {result['error']['rank']}: {result['error']['summary']}"
    losses = result["loss"]
    return (
        f"{result['step_ms']['median']:.1f} ms a step, {result['samples_per_s']:.1f} samples/s, loss {losses[-1]:.4f}"
    )


class Lines:
    """Plain lines: a run's start and end, and every twentieth step."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def begin(self, run: Planned) -> None:
        self.console.print(f"{_label(run)} ...", markup=False, highlight=False, soft_wrap=True)

    def step(self, message: dict[str, Any]) -> None:
        number = message["step"] + 1
        if number == 1 or number % 20 == 0:
            text = f"  step {number}: loss {message['loss']:.4f}, {message['step_ms']:.1f} ms"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self, run: Planned, result: dict[str, Any]) -> None:
        self.console.print(f"{_label(run)}: {_outcome(result)}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to put away."""


class Bars:
    """One bar a run."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[state]}"), console=console)
        self.progress.start()
        self.task: TaskID | None = None

    def note(self, text: str) -> None:
        self.progress.console.print(f"[yellow]note:[/] {escape(text)}")

    def begin(self, run: Planned) -> None:
        total = run.train.steps * run.train.epochs or None
        self.task = self.progress.add_task(escape(_label(run)), total=total, state="starting")

    def step(self, message: dict[str, Any]) -> None:
        assert self.task is not None
        state = f"loss {message['loss']:.3f}, {message['step_ms']:.0f} ms"
        self.progress.update(self.task, completed=message["step"] + 1, state=state)

    def end(self, run: Planned, result: dict[str, Any]) -> None:
        assert self.task is not None
        colour = "red" if result["status"] == "crashed" else "green"
        self.progress.update(self.task, state=f"[{colour}]{escape(_outcome(result))}[/]")

    def close(self) -> None:
        """Leave the last state of the bars on the screen."""
        self.progress.stop()


def watcher(console: Console) -> Lines | Bars:
    """The one that fits where the output goes."""
    return Bars(console) if console.is_terminal else Lines(console)
