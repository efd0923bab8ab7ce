"""`syncline trace`: analyze, view, diff or export the trace of a run."""

from typing import ClassVar

from syncline.cli.app import LazyGroup, new_app


class Actions(LazyGroup):
    """The commands of `syncline trace`."""

    package = "syncline.cli.trace"
    summaries: ClassVar = {
        "analyze": "Explain where the time of a step goes, why, and what could be gained.",
        "view": "Make a page with the timeline and the diagnosis, or serve it here.",
        "diff": "Compare two traces phase by phase; the exit code is for CI.",
        "export": "Write a trace for chrome://tracing or Perfetto, also in Horovod's style.",
    }


app = new_app(Actions)


@app.callback()
def _trace() -> None:
    """Work with the trace of a run, of torch.profiler or of Horovod."""
