"""Verdicts of a comparison: one sentence per strategy, remarks about it, and cautions for the whole comparison.

The sentence says what the step is spent on, and why the strategy is faster or slower than the others. Every claim has
its evidence. A difference is claimed only where the confidence intervals of the medians do not overlap. The same
results always give the same words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.report.compare import (
    Behind,
    Row,
    parts_ms,
    per_sample,
    ranking,
    rows,
    share,
    that_train_well,
    with_several_ranks,
    workers,
)
from syncline.report.figures import bandwidth, duration, one_line, percent, plural, seconds, size, times
from syncline.report.scaling import DOMINATES, start_up
from syncline.results.file import finite, numbers
from syncline.results.schema import AT_MOST, Results
from syncline.trace.span import PHASES

PART_NAMES = {phase: phase.replace("_", " ") for phase in PHASES} | {
    "data": "loading data",
    "wait": "waiting for a late rank",
    "update": "the update",
    "between": "the time between steps",
    "other": "time that no span covers",
}

_ENOUGH = 10
"""With fewer steady steps the interval is the whole range, and equality means nothing."""


@dataclass(frozen=True)
class Verdict:
    """A run's label, its sentence, and further remarks (start-up, divergence, bytes off theory)."""

    label: str
    ok: bool
    sentence: str
    remarks: tuple[str, ...] = ()


def verdicts(results: Results) -> list[Verdict]:
    """One verdict per run, in the order of the file."""
    table = rows(results)
    found = []
    for row in table:
        if row.ok:
            sentence = "; ".join([_place(row, table), *_causes(row, table, results)]) + "."
            found.append(Verdict(row.label, True, sentence, tuple(_remarks(row))))
        else:
            found.append(Verdict(row.label, False, _crash(row)))
    return found


def headline(results: Results) -> str:
    """The whole comparison in one sentence."""
    table = rows(results)
    good = ranking(table)
    crashed = sum(not row.ok for row in table)
    tail = f"; {plural(crashed, 'run')} crashed" if crashed else ""
    if not good:
        return "No strategy finished." if table else "Nothing was run."
    if len(good) == 1:
        return f"{good[0].label} takes {duration(good[0].median)} per step (median){tail}."
    well = that_train_well(good) or good
    sentences = [_fastest(well, among="" if len(well) == len(good) else " that train equally well")]
    several = with_several_ranks(well)
    if several and several[0] is not well[0] and len(several) > 1:
        sentences.append(_fastest(several, among=" with several ranks"))
    at_best = several[0] if several else well[0]
    sentences += [
        f"{row.label} takes {duration(row.median)}, but {_loss_above(row.behind)}"
        for row in good
        if row.behind is not None and per_sample(row) < per_sample(at_best)
    ]
    return f"{'. '.join(sentences)}{tail}."


def _fastest(order: Sequence[Row], *, among: str = "") -> str:
    """`ddp is the fastest of 4: 885 ms per step (median)`, or the runs that are equal within noise."""
    best, gain = order[0], ""
    if len(order) == 1:
        return f"{best.label} takes {duration(best.median)} per step (median)"
    if best.speedup is not None and best.against not in (None, best.label):
        at = "" if best.efficiency is None else f" at {percent(best.efficiency)} efficiency"
        gain = f", {times(best.speedup)} the throughput of {best.against}{at}"
    equal = [best, *_equals(best, order)]
    if len(equal) > 1:
        names = _listed([row.label for row in equal])
        if any((row.run["step_ms"]["n"] or 0) < _ENOUGH for row in equal):
            return f"Too few steps to separate {names}: {duration(best.median)} per step (median) at best{gain}"
        return f"{names} are the fastest{among}, equal within noise: {duration(best.median)} per step (median){gain}"
    return f"{best.label} is the fastest of {len(order)}{among}: {duration(best.median)} per step (median){gain}"


def _loss_above(behind: Behind) -> str:
    if math.isinf(behind.ratio):
        return f"its loss is not a finite number at the end, where {behind.label} still trains"
    return f"its loss is {percent(behind.ratio - 1)} above that of {behind.label} (mean of {behind.steps} steps)"


def cautions(results: Results) -> list[str]:
    """Warnings about the machine and the runs that a reader needs before comparing times."""
    found = []
    cores = finite(results.get("environment", {}).get("cores"))
    emulated = bool(results.get("network", {}).get("emulated"))
    machines = 1 if emulated else max((run.get("nodes", 1) for run in results["runs"]), default=1)
    most = max((workers(run) + run.get("servers", 0) for run in results["runs"]), default=0)
    most = -(-most // machines)  # on each of them
    if cores and most > cores and not results["environment"].get("gpu"):
        found.append(
            f"{most} ranks share {plural(int(cores), 'core')}, so forward and backward are slower than on {most} "
            "machines: compare exchange shares and bytes, not absolute times or efficiency."
        )
    network = results.get("network", {})
    if network and not emulated and machines == 1 and most > 1:
        note = network.get("note")
        reason = f" ({one_line(note)})" if note else ""
        found.append(
            f"The ranks talk inside one machine, not over shaped links{reason}: exchange is cheaper than on a network."
        )
    for row in rows(results):
        total = sum(share(row.run, part) for part in PHASES)
        if row.ok and abs(total - 1) > 0.01:
            found.append(f"The shares of {row.label} sum to {total:.2f}, not 1: part of its step is counted wrongly.")
    return found


def _crash(row: Row) -> str:
    error = row.run.get("error") or {"rank": -1, "summary": "no reason was recorded", "traceback": ""}
    done = len(row.run.get("loss", []))
    after = f" after {plural(done, 'step')}" if done else ""
    where = f"on rank {error['rank']}" if error["rank"] >= 0 else "before its ranks started"
    return f"crashed {where}{after}: {one_line(error['summary']).rstrip('.')}."


def _place(row: Row, table: Sequence[Row]) -> str:
    """`885 ms per step, the fastest of 4` and the like."""
    order = that_train_well(ranking(table))
    text = f"{duration(row.median)} per step"
    if row.median is None or not order or order == [row]:
        return text
    best = order[0]
    if row is best:
        equal = _listed([other.label for other in _equals(best, order)])
        return f"{text}, equal to {equal} within noise" if equal else f"{text}, the fastest of {len(order)}"
    if _same(row, best):
        return f"{text}, equal to {best.label} within noise"
    ratio = times(per_sample(row) / per_sample(best))
    if row.run.get("batch") != best.run.get("batch"):
        return f"{text}, {ratio} {best.label}'s time per sample"
    return f"{text}, {ratio} {best.label}'s"


def _causes(row: Row, table: Sequence[Row], results: Results) -> list[str]:
    other = _reference(row, table)
    spent = _spent(row, results)
    if other is None or row.median is None or other.median is None or _same(row, other):
        return [spent]
    ours, theirs = parts_ms(row.run), parts_ms(other.run)
    slower = row.median > other.median
    gaps = {part: (ours[part] - theirs[part]) * (1 if slower else -1) for part in PHASES}
    part = max(gaps, key=lambda name: gaps[name])
    whole = abs(row.median - other.median)
    if gaps[part] <= 0 or whole == 0:
        return [spent]
    word = "more" if slower else "less"
    claim = f"against {other.label} it spends {duration(gaps[part])} {word} on {PART_NAMES[part]}"
    because = _because(part, row, other, slower=slower)
    return [spent, f"{claim}, {because}" if because else claim]


def _spent(row: Row, results: Results) -> str:
    """What the step is spent on: compute if that is most of it, else the largest cost of distribution."""
    run = row.run
    compute = share(run, "forward") + share(run, "backward")
    overhead = max((p for p in PHASES if p not in ("forward", "backward")), key=lambda p: share(run, p))
    most = share(run, overhead)
    if workers(run) == 1:
        largest = f"{percent(most)} of it is {PART_NAMES[overhead]}, " if most > compute else ""
        return f"{largest}{percent(compute)} of it is forward and backward, nothing is exchanged"
    if compute >= 0.5 or compute > most:
        text = f"{percent(compute)} of it is forward and backward"
        return (
            f"{text}, {percent(most)} {_name(overhead, results)}{_detail(overhead, row, results)}"
            if most >= 0.05
            else text
        )
    return f"{percent(most)} of it is {_name(overhead, results)}{_detail(overhead, row, results)}"


def _name(part: str, results: Results) -> str:
    return "waiting for the other stages of its pipeline" if part == "wait" and _piped(results) else PART_NAMES[part]


def _piped(results: Results) -> bool:
    """Whether models were cut into stages, which wait for one another even if none is late."""
    return bool(results.get("config", {}).get("train", {}).get("pipe", 1) != 1)


def _detail(part: str, row: Row, results: Results) -> str:
    """The evidence behind one overhead."""
    if part == "wait" and row.late_rank is not None and row.waited_ms and not _piped(results):
        return f" (rank {row.late_rank} is the late one, by up to {duration(row.waited_ms)})"
    moved = finite(row.run.get("wire_bytes_per_step"))
    if part != "exposed_exchange" or not moved:
        return ""
    text = f": the busiest rank's link carries {_bytes(row, moved)} per step"
    speed = finite(results.get("network", {}).get("bandwidth"))
    if not speed or results["network"].get("changes"):
        return text
    floor = moved * 8000 / speed
    # While a rank waits for a late one, others already send, so neither exposed exchange nor wait was hidden.
    parts = parts_ms(row.run)
    hidden = 1 - (parts[part] + parts["wait"]) / floor
    covered = f", {percent(hidden)} of that behind compute" if hidden >= 0.05 else ""
    return f"{text}, at least {duration(floor)} at {bandwidth(speed)}{covered}"


def _bytes(row: Row, moved: float) -> str:
    """`229 MB (2(N-1)S = 221 MB)`: what was counted, and the formula."""
    wire = row.run.get("wire", {})
    formula, theory = one_line(wire.get("formula", ""), limit=40), finite(wire.get("theory_bytes"))
    if not formula:
        return size(moved)
    if not wire.get("measured") or theory is None:
        return f"{formula} = {size(moved)}"
    return f"{size(moved)} ({formula} = {size(theory)})"


def _because(part: str, row: Row, other: Row, *, slower: bool) -> str:
    ours, theirs = finite(row.run.get("wire_bytes_per_step")), finite(other.run.get("wire_bytes_per_step"))
    if part == "exposed_exchange" and ours and theirs:
        if 0.9 < ours / theirs < 1.1:
            return f"with the same bytes: it hides {'less' if slower else 'more'} of them behind backward"
        return f"moving {times(ours / theirs)} its bytes"
    if part in ("forward", "backward"):
        mine, its = _samples(row), _samples(other)
        if mine and its and mine != its:
            return f"computing {mine:g} samples per rank instead of {its:g}"
    return ""


def _samples(row: Row) -> float | None:
    batch = finite(row.run.get("batch"))
    return batch / workers(row.run) if batch else None


def _reference(row: Row, table: Sequence[Row]) -> Row | None:
    """The run to compare with: the fastest that trains well at its world size; for that one itself, the next one."""
    order = [other for other in ranking(table) if other.behind is None or other is row]
    if len(order) < 2 or row not in order:
        return None
    peers = [other for other in order if workers(other.run) == workers(row.run)]
    first, second, *_ = peers if len(peers) > 1 else order
    return second if row is first else first


def _equals(best: Row, order: Sequence[Row]) -> list[Row]:
    """The other runs that cannot be separated from the fastest, wherever they are in the order."""
    return [row for row in order if row is not best and _same(best, row)]


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _same(one: Row, other: Row) -> bool:
    if one.interval is None or other.interval is None:
        return False
    return one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]


def _remarks(row: Row) -> list[str]:
    """Further facts about one finished run: divergence, start-up, bytes, plans, buffers."""
    found = []
    losses = row.run.get("loss", [])
    bad = next((i for i, loss in enumerate(losses) if finite(loss) is None), None)
    if bad is not None:
        found.append(f"Its loss is not a finite number from step {bad + 1} on: the training diverged.")
    if row.behind is not None:
        found.append(f"It trains worse: {_loss_above(row.behind)}. So its speed is no gain.")
    start = start_up(row.run)
    if start.first_epoch_s and start.later_epoch_s and start.first_epoch_s > 2 * start.later_epoch_s:
        ratio = times(start.first_epoch_s / start.later_epoch_s)
        found.append(
            f"The first epoch takes {seconds(start.first_epoch_s)}, {ratio} a later one "
            f"({seconds(start.later_epoch_s)}): judge scaling by the later ones."
        )
    if start.share > DOMINATES and start.largest:
        name, ms = start.largest
        found.append(
            f"Start-up is {percent(start.share)} of this run ({duration(start.total_ms)}), most of it "
            f"{name} ({duration(ms)}): a longer run would show less of it."
        )
    if row.superlinear:
        found.append(
            f"No efficiency is shown: its throughput is {times(row.speedup)} that of {row.against}, more than its ranks"
            f" explain, so {row.against} was held back by something else (memory, caches, other programs)."
        )
    moved, theory = finite(row.run.get("wire_bytes_per_step")), finite(row.run.get("wire", {}).get("theory_bytes"))
    upper_bound = row.run.get("wire", {}).get("formula", "").endswith(AT_MOST)
    if row.wire_ratio is not None and (row.wire_ratio > 1.15 or (row.wire_ratio < 0.85 and not upper_bound)):
        more = "The formula counts gradients only, not buffers, packet headers, acknowledgements and steps of tuning."
        less = "In some of its steps it sent less than the formula says."
        found.append(
            f"Its link carried {size(moved)} per step, where the formula gives {size(theory)}. "
            f"{more if row.wire_ratio > 1 else less}"
        )
    planned = row.run.get("planned_at", [])
    if len(planned) > 1:
        again = ", ".join(map(str, planned[1:]))
        found.append(
            f"It planned after step {planned[0]}, and again after step {again}, when what it measured had drifted."
        )
    if guarded := row.run.get("guarded_at", []):
        found.append(
            f"It changed codecs after step {', '.join(map(str, guarded))}, because of the errors that it measured."
        )
    if row.nearest and workers(row.run) > 1 and _losses_match(row):
        gap = row.nearest.difference
        exact = f"to within {gap:.1e}" if gap else "to the last bit"
        found.append(f"Its losses equal those of {row.nearest.label}, {exact}.")
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
        return False  # a diverged run matches no other
    scale = max(numbers(losses), key=abs, default=0.0)
    return row.nearest is not None and row.nearest.difference <= 1e-3 * abs(scale)
