"""From the ranks' records to one row of `results.json`. Pure functions without I/O."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from syncline.engine.tuning.tuner import GUARD, REPLAN
from syncline.pipeline.freeze.freezer import FREEZE
from syncline.stats import mean_of_known, summary
from syncline.trace import PHASES, Span, partition, shares
from syncline.train.checkpoint.history import History, merge_epochs
from syncline.train.rank.record import RankRecord
from syncline.train.strategies import load
from syncline.train.strategies.base import Traffic

RESTRUCTURINGS = (FREEZE, "reshape")
"""Names of the spans in which a model or a pipeline changes its shape."""


def assemble(
    strategy: str, records: Sequence[RankRecord], spans: Sequence[Span], *, batch: int, nodes: int
) -> dict[str, Any]:
    """The row of one strategy; `records` are in rank order, aggregators last, and `spans` are their merged spans."""
    workers = [(record, record.history) for record in records if record.history is not None]
    first, first_history = workers[0]
    first_complete = max(record.first_complete_step for record, _ in workers)
    ranks = [
        rank_row(record, history, [s for s in spans if s.rank == record.part.rank], first_complete=first_complete)
        for record, history in workers
    ]
    # Not the maximum: ranks that overlap steps are early in one and late in the next, and it would count delays twice.
    series = _means([rank["step_ms_series"] for rank in ranks])
    times = _times(series, first_history)
    median = times["step_ms"]["median"] or float("nan")
    began = first_history.resumed_at[-1] if first_history.resumed_at else 0
    measured = all(record.network is not None for record in records)
    theories = [record.theory.serial for record in records if record.theory is not None]
    theory = max(theories, default=None)
    return {
        "strategy": strategy,
        "status": "ok",
        "error": None,
        "world_size": len(workers),
        "servers": len(records) - len(workers),
        "nodes": nodes,
        "batch": batch,
        **times,
        "startup_ms": {key: max(record.startup_ms[key] for record, _ in workers) for key in first.startup_ms},
        "loss": _means([history.losses for _, history in workers]),
        "test_accuracy": mean_of_known([history.accuracy for _, history in workers]),
        "train_accuracy": mean_of_known([record.train_accuracy for record, _ in workers]),
        "peak_memory_bytes": max((r.peak_memory_bytes for r, _ in workers if r.peak_memory_bytes), default=None),
        "samples_per_s": batch / median * 1e3,
        "syncs_per_s": first.phases / median * 1e3 if len(workers) > 1 else 0.0,
        "synchronised_bytes": max(record.synchronised_bytes for record, _ in workers),
        "wire_bytes_per_step": max(_serial_bytes(record) for record in records) if measured else theory,
        "wire": {"measured": measured, "theory_bytes": theory, "formula": load(strategy).formula if theories else ""},
        "breakdown": {phase: mean_of_known([rank["breakdown"][phase] for rank in ranks]) for phase in PHASES},
        "epochs": merge_epochs([history.epochs for _, history in workers]),
        "buffer_divergence": max(record.buffer_divergence for record, _ in workers),
        "planned_at": ranks[0]["planned_at"],
        "guarded_at": ranks[0]["guarded_at"],
        **({"restructurings": found} if (found := restructurings(spans, series, first=began)) else {}),
        "ranks": ranks,
    }


def restructurings(spans: Sequence[Span], series: Sequence[float], *, first: int = 0) -> list[dict[str, Any]]:
    """Freezes and reshapes: the slowest rank's cost, the steps they shortened, and when that had paid for it.

    `series` has the milliseconds of each step, and `first` is the first step with spans (after a resume). Steps between
    two changes are compared with those between the next two.
    """
    found: dict[tuple[int, str, str], float] = {}
    for span in spans:
        if span.lane == "between" and span.name in RESTRUCTURINGS:
            key = (span.step, span.name, span.unit)
            found[key] = max(found.get(key, 0.0), (span.end - span.start) / 1e6)
    # A freeze and the reshape behind it, with no step in between, shorten steps together.
    at = sorted({step for step, _, _ in found})
    # The first step after a change builds units and buckets again, and the first step of a run is a warm-up.
    edges = [first + 1, *(step + 2 for step in at), len(series) + 1]
    medians = [_median(series[low : max(low, high - 1)]) for low, high in pairwise(edges)]
    made = []
    for (step, kind, what), cost in sorted(found.items()):
        before, after = medians[at.index(step)], medians[at.index(step) + 1]
        saved = None if before is None or after is None else before - after
        # What comes together is paid back together, with the slow step behind it, which counts for the last of them.
        slow = 0.0 if after is None else max(0.0, _at(series, step + 1) - after)
        same = [key for key in found if key[0] == step]
        together = slow + sum(found[key] for key in same)
        cost += slow if (step, kind, what) == max(same) else 0.0
        payback = together / saved if saved is not None and saved > 0 else None
        row = {"step": step, "kind": kind, "what": what, "cost_ms": cost, "saved_ms": saved}
        made.append({**row, "payback_steps": payback, "steps_after": max(0, len(series) - 1 - step)})
    return made


def with_payback(spans: Sequence[Span], changes: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The spans, where those of freezes and reshapes also say when they had paid for themselves."""
    said = {}
    for change in changes:
        steps = change["payback_steps"]
        when = "not paid back"
        if steps is not None:
            done = steps <= change["steps_after"]
            when = (
                f"paid back after {math.ceil(steps)} steps" if done else f"would be paid back after {math.ceil(steps)}"
            )
        said[change["step"], change["kind"], change["what"]] = f"{change['what']}, {when}"
    return [
        replace(span, unit=said.get((span.step, span.name, span.unit), span.unit)) if span.lane == "between" else span
        for span in spans
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _at(series: Sequence[float], step: int) -> float:
    return series[step] if step < len(series) else 0.0


def rank_row(record: RankRecord, history: History, spans: Sequence[Span], *, first_complete: int) -> dict[str, Any]:
    """The row of one rank. Steps before a resume have times but no spans, so they are not in the shares."""
    series = history.step_ms[: history.resumed_at[-1]] if history.resumed_at else []
    series += [(s.end - s.start) / 1e6 for s in sorted(spans, key=lambda s: s.step) if s.lane == "step"]
    on_gpu = record.backend == "nccl"
    steps = partition((s for s in spans if s.step >= first_complete), on_gpu=on_gpu) or partition(spans, on_gpu=on_gpu)
    first = min(steps, default=None)
    planned = sorted({s.step + 1 for s in spans if s.name == REPLAN})
    # Until its first plan the engine measures: these steps count as start-up, too.
    tuned = {step: phases for step, phases in steps.items() if planned and step >= planned[0]}
    later = {step: phases for step, phases in steps.items() if step != first}
    # With fewer than three steps under a plan, the steps before it count, too.
    steady = (tuned if len(tuned) >= 3 else later) or steps
    theory, network = record.theory, record.network
    return {
        "rank": record.part.rank,
        "node": record.node,
        "host": record.host,
        **_times(series, history),
        "loss": history.losses,
        "test_accuracy": history.accuracy,
        "train_accuracy": record.train_accuracy,
        "peak_memory_bytes": record.peak_memory_bytes,
        "breakdown": shares(steady) if steady else dict.fromkeys(PHASES),
        "planned_at": planned,
        "guarded_at": sorted({s.step + 1 for s in spans if s.name == GUARD}),
        "wire": {
            "measured": network is not None,
            "sent": theory and theory.sent if network is None else network.sent,
            "received": theory and theory.received if network is None else network.received,
            "theory_sent": theory and theory.sent,
            "theory_received": theory and theory.received,
        },
    }


def _means(series: Sequence[Sequence[float]]) -> list[float]:
    """The mean over ranks at each step."""
    return [sum(values) / len(values) for values in zip(*series, strict=True)]


def _times(series: Sequence[float], history: History) -> dict[str, Any]:
    """Step times. The summary leaves out the first step and the first step after each resume, which are warm-up."""
    steady = [ms for step, ms in enumerate(series) if step and step not in history.resumed_at] or series
    return {"step_ms": summary(steady), "first_step_ms": series[0], "step_ms_series": series}


def _serial_bytes(record: RankRecord) -> float:
    """Measured bytes, with bytes that go both ways at once counted once, in the proportion of the strategy's theory."""
    assert record.network is not None
    theory = record.theory or Traffic(1, 1, 1)
    both = theory.sent + theory.received
    return float((record.network.sent + record.network.received) * (theory.serial / both if both else 0.5))
