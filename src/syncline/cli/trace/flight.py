"""Flight-recorder dumps as `syncline trace analyze` shows them: the verdict, each rank's call, and arrival order."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from syncline.report.figures import one_line, percent, plural, printable, significant
from syncline.report.tables import simple_table
from syncline.trace.analysis.flight import FlightDiagnosis
from syncline.trace.analysis.flight_calls import ranks_text
from syncline.trace.formats.flight_read import dump_files
from syncline.trace.formats.load import TRACE, runs
from syncline.trace.merge.rank_file import has_rank_files

_MOST_RANKS, _MOST_LATE = 16, 3


def find_dumps(path: Path) -> list[Path]:
    """The flight-recorder dumps in a folder that is not a run folder, or the file itself if it is one."""
    if path.is_dir() and ((path / TRACE).is_file() or has_rank_files(path) or runs(path)):
        return []
    return dump_files(path)


def print_flight(console: Console, diagnosis: FlightDiagnosis, source: str, *, top: int) -> None:
    """Print the verdict, further findings, the call that each rank is in, and which ranks were last."""

    def line(text: str) -> None:
        console.print(Text(printable(text)))

    line(f"flight recorder: {source}")
    line(f"{len(diagnosis.ranks)} of {plural(diagnosis.world, 'rank')}, {diagnosis.backend or 'no calls'}")
    line(f"verdict: {diagnosis.sentence}")
    for frame in diagnosis.findings[0].frames if diagnosis.findings else ():
        line(f"    {frame.file}:{frame.line} in {frame.name}")
    for finding in diagnosis.findings[1:top]:
        line(f"also: {finding.sentence}")
    shown = [rank for rank in diagnosis.last_calls if rank in diagnosis.culprits]
    shown += [rank for rank in diagnosis.last_calls if rank not in diagnosis.culprits]
    rows = []
    for rank in sorted(shown[:_MOST_RANKS]):
        call = diagnosis.last_calls[rank]
        where = one_line(call.user_frames[0], limit=60) if call.user_frames else "-"
        state = "done" if call.done else "started" if call.started else "not finished"
        rows.append([str(rank), printable(call.op), str(call.sequence), printable(call.group), state, printable(where)])
    if rows:
        console.print(simple_table("calls", ["rank", "in or after", "number", "group", "state", "at"], rows))
    if len(shown) > _MOST_RANKS:
        line(f"and {plural(len(shown) - _MOST_RANKS, 'other rank')}")
    for row in diagnosis.arrivals[: min(top, _MOST_LATE)]:
        after = f"{significant(row.median_ms)} ms after the others (median)"
        often = f"{ranks_text(row.ranks)}, {plural(row.times_last, 'time')}"
        line(f"last: {often}, {after}, {percent(row.share)} of all delays")
    for note in diagnosis.notes:
        line(f"note: {note}")
