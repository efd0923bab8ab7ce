"""The traces that lie beside results: found, matched to the runs, and read once for as long as they do not change."""

import functools
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import UsageError
from syncline.report.compare import labels
from syncline.report.excerpt import LIMIT
from syncline.report.figures import one_line, size
from syncline.report.panels import Panel, folder_label, panel
from syncline.results.schema import Results
from syncline.trace.formats.load import TRACE, find

ALL = 400_000
"""Spans of all runs together that a page holds at most."""

LARGE = 48 << 20
"""Compressed bytes from which a trace is not read for a report: it would take minutes."""


@dataclass(frozen=True)
class Traces:
    """The panels of the runs that have a trace, in the order of the results, and why others have none."""

    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()


def traces(results: Results, folder: Path) -> Traces:
    """The traces in `folder`, the run folder of `results`."""
    files = sorted(folder.glob(f"runs/*/{TRACE}"))
    limit = min(LIMIT, ALL // max(1, len(files)))
    found: list[Panel] = []
    notes: list[str] = []
    runs = results["runs"]
    places = {
        (run.get("strategy"), run.get("world_size")): (label, index)
        for index, (run, label) in enumerate(zip(runs, labels(runs), strict=True))
    }
    for file in files:
        try:
            state = file.stat()
            if state.st_size > LARGE:
                raise UsageError(
                    f"its trace takes {size(state.st_size)}: see it with `syncline trace view {file.parent}`"
                )
            made, key = _panel(file, (state.st_mtime_ns, state.st_size), limit)
            found.append(made.placed(*places[key]) if key in places else made)
        except UsageError as error:
            notes.append(f"{file.parent.name} has no timeline: {error}")
        except OSError as error:
            notes.append(f"{file.parent.name} has no timeline: cannot read {file.name}: {error.strerror}")
        except Exception as error:  # whatever one trace holds, the results and the others are shown
            notes.append(f"{file.parent.name} has no timeline: {one_line(f'{type(error).__name__}: {error}')}")
    found.sort(key=lambda one: (one.index < 0, one.index))
    return Traces(tuple(found), tuple(notes))


@functools.lru_cache(maxsize=32)
def _panel(file: Path, state: tuple[int, int], limit: int) -> tuple[Panel, tuple[object, object]]:
    """`state` changes with the file: a comparison writes its page after each run, and reads only what is new."""
    del state
    source = find(file)
    key = (source.metadata.get("strategy"), source.metadata.get("world_size"))
    return panel(source, label=folder_label(source.path, source.metadata), limit=limit), key
