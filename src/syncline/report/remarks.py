"""Remarks beside the verdicts: what makes a figure mean less, or more, than it seems to."""

from syncline.report.compare import Row, rows, share, workers
from syncline.report.figures import duration, one_line, percent, plural, times
from syncline.report.scaling import DOMINATES, start_up
from syncline.results.file import finite, numbers
from syncline.results.schema import SHARES, Results


def cautions(results: Results) -> list[str]:
    """What a reader must know before comparing times, derived from the machine and the runs."""
    found = []
    cores = finite(results.get("environment", {}).get("cores"))
    most = max((workers(run) + run.get("servers", 0) for run in results["runs"]), default=0)
    if cores and most > cores and not results["environment"].get("gpu"):
        found.append(
            f"{most} ranks share {plural(int(cores), 'core')}, so forward and backward are slower than on {most} "
            "machines: compare exchange shares and bytes, not absolute times or efficiency."
        )
    network = results.get("network", {})
    if network and not network.get("emulated") and most > 1:
        note = network.get("note")
        reason = f" ({one_line(note)})" if note else ""
        found.append(
            f"The ranks talk inside one machine, not over shaped links{reason}: exchange is cheaper than on a network."
        )
    for row in rows(results):
        total = sum(share(row.run, part) for part in SHARES)
        if row.ok and abs(total - 1) > 0.01:
            found.append(f"The shares of {row.label} sum to {total:.2f}, not 1: part of its step is counted wrongly.")
    return found


def remarks(row: Row) -> list[str]:
    """What else is worth knowing about one finished run."""
    found = []
    losses = row.run.get("loss", [])
    bad = next((i for i, loss in enumerate(losses) if finite(loss) is None), None)
    if bad is not None:
        found.append(f"Its loss is not a finite number from step {bad + 1} on: the training diverged.")
    start = start_up(row.run)
    if start.first_epoch_s and start.later_epoch_s and start.first_epoch_s > 2 * start.later_epoch_s:
        ratio = times(start.first_epoch_s / start.later_epoch_s)
        found.append(
            f"The first epoch takes {duration(start.first_epoch_s * 1000)}, {ratio} a later one "
            f"({duration(start.later_epoch_s * 1000)}): judge scaling by the later ones."
        )
    if start.share > DOMINATES and start.largest:
        name, ms = start.largest
        found.append(
            f"Start-up is {percent(start.share)} of this run ({duration(start.total_ms)}), most of it "
            f"{name} ({duration(ms)}): a longer run would show less of it."
        )
    if row.wire_ratio is not None and abs(row.wire_ratio - 1) > 0.15:
        found.append(f"Its link carried {percent(row.wire_ratio)} of the formula's bytes.")
    planned = row.run.get("planned_at", [])
    if len(planned) > 1:
        again = ", ".join(map(str, planned[1:]))
        found.append(
            f"It planned after step {planned[0]}, and again after step {again}, when what it measured had drifted."
        )
    if row.nearest and workers(row.run) > 1 and _losses_match(row):
        gap = row.nearest.difference
        exact = f"to within {gap:.1e}" if gap else "to the last bit"
        found.append(f"Its losses are those of {row.nearest.label}, {exact}.")
    divergence = finite(row.run.get("buffer_divergence"))
    if divergence:
        found.append(
            f"BatchNorm buffers differ between ranks by up to {divergence:.2g}, "
            "so each rank tests a slightly different model."
        )
    return found


def _losses_match(row: Row) -> bool:
    losses = row.run.get("loss", [])
    if any(finite(loss) is None for loss in losses):
        return False  # a run that diverged has no losses to be those of another
    scale = max(numbers(losses), key=abs, default=0.0)
    return row.nearest is not None and row.nearest.difference <= 1e-3 * abs(scale)
