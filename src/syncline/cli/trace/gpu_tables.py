"""The GPU part of an analysis as text for a terminal: use, idle time by what the host did, kernels and operators."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from syncline.report.figures import Columns, one_line, percent, printable, tabulate
from syncline.report.tables import simple_table
from syncline.trace.analysis.gpu_use import GpuUse
from syncline.trace.gpu_activity import HOST_WAIT, KERNEL_WAIT, OTHER_WAIT

_MOST_RANKS = 16
_WIDE = 80  # columns of a terminal; a narrower one shows less
_LONGEST_NAME = 60


def print_gpu(console: Console, gpu: GpuUse, *, top: int) -> None:
    """Print how the GPUs are used; each table has at most `top` rows."""
    wide = console.width >= _WIDE
    uses: Columns = (
        ("rank", lambda rank: str(rank.rank)),
        ("comp.", lambda rank: _ms(rank.compute_ms)),
        ("comm.", lambda rank: _ms(rank.communication_ms)),
        ("idle", lambda rank: _ms(rank.idle_ms)),
        ("share", lambda rank: percent(rank.idle_ms / rank.whole_ms if rank.whole_ms else None)),
        ("host", lambda rank: _ms(rank.idle_by_kind[HOST_WAIT])),
        ("kernel", lambda rank: _ms(rank.idle_by_kind[KERNEL_WAIT])),
        ("other", lambda rank: _ms(rank.idle_by_kind[OTHER_WAIT])),
        ("copies", lambda rank: _ms(rank.copies_ms)),
        ("hidden", lambda rank: percent(rank.overlap)),
    )
    title = "GPU, ms per step; idle: host wait, kernel wait, other"
    console.print(simple_table(title, *tabulate(uses if wide else uses[:6], gpu.ranks[:_MOST_RANKS])))
    if gpu.gaps:
        gaps: Columns = (
            ("the host", lambda row: _name(row.doing, console.width - 26)),
            ("ms", lambda row: _ms(row.ms)),
            ("times", lambda row: f"{row.count:.3g}"),
            ("longest", lambda row: _ms(row.longest_ms)),
        )
        title = f"idle because the host was late ({_some(gpu.gaps, top)}), ms per step"
        console.print(simple_table(title, *tabulate(gaps, gpu.gaps[:top])))
    classes = ", ".join(f"{kind} {_ms(ms)}" for kind, ms in gpu.classes.items())
    console.print(Text(printable(f"kernels by class, ms per step: {classes}")), soft_wrap=not console.is_terminal)
    kernels: Columns = (
        ("kernel", lambda row: _name(row.name, console.width // 2 - 10)),
        ("ms", lambda row: _ms(row.ms)),
        ("times", lambda row: f"{row.count:.3g}"),
        ("class", lambda row: row.kind),
        ("operator", lambda row: _name(row.operator, console.width // 4)),
    )
    title = f"kernels by time ({_some(gpu.kernels, top)}), ms per step"
    console.print(simple_table(title, *tabulate(kernels if wide else kernels[:3], gpu.kernels[:top])))
    operators: Columns = (
        ("operator", lambda row: _name(row.name, console.width - 20)),
        ("ms", lambda row: _ms(row.ms)),
        ("kernels", lambda row: f"{row.count:.3g}"),
    )
    title = f"operators by time on the GPU ({_some(gpu.operators, top)}), ms per step"
    console.print(simple_table(title, *tabulate(operators, gpu.operators[:top])))


def _some(rows: Sequence[object], top: int) -> str:
    return f"{min(top, len(rows))} of {len(rows)}"


def _name(text: str, room: int) -> str:
    most = min(_LONGEST_NAME, max(10, room))
    shown = one_line(text)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
