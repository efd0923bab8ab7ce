"""From the ranks' records to one entry of `results.json`: pure, no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.engine.tuning.tuner import REPLAN
from syncline.stats import summary
from syncline.trace import PHASES, Span, partition, shares
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge import Part, Trace, merge
from syncline.trace.merge.metadata import rank_metadata
from syncline.train.strategies import load

_FEWEST = 3
"""Steps under a plan from which shares are taken without those before it."""


def merged(records: Sequence[Mapping[str, Any]]) -> Trace:
    """All ranks' spans on rank 0's clock, with exchanges matched across ranks."""
    return merge([_part(record) for record in records])


def about_ranks(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a trace says of its ranks beside their spans; what is not known is left out."""
    return rank_metadata(
        hosts={record["rank"]: record["boot_id"] for record in records},
        cores={record["rank"]: record["cores"] for record in records},
        cpu_times={record["rank"]: record["usage"] for record in records},
        recorders=[record["recorder"] for record in records],
        prediction_ms=records[0].get("prediction_ms"),
    )


def assemble(
    strategy: str, records: Sequence[Mapping[str, Any]], spans: Sequence[Span], *, batch: int, nodes: int
) -> dict[str, Any]:
    """The run of one strategy; `records` are in rank order, aggregators last."""
    workers = [record for record in records if "losses" in record]
    whole = max(record["whole_from"] for record in workers)
    entries = [_rank(record, [s for s in spans if s.rank == record["rank"]], whole) for record in workers]
    # Not the maximum: ranks that overlap steps are early in one and late in the next, and it would count delays twice.
    series = [sum(values) / len(values) for values in zip(*(e["step_ms_series"] for e in entries), strict=True)]
    steady = summary(_steady(series, workers[0].get("resumed_at", ())))
    measured = all(record.get("wire") is not None for record in records)
    theory = max(record["theory"]["serial"] for record in records)
    median = steady["median"] or float("nan")
    return {
        "strategy": strategy,
        "status": "ok",
        "error": None,
        "world_size": len(workers),
        "servers": len(records) - len(workers),
        "nodes": nodes,
        "batch": batch,
        "step_ms": steady,
        "step_ms_series": series,
        "first_step_ms": series[0],
        "startup_ms": {k: max(r["startup_ms"][k] for r in workers) for k in workers[0]["startup_ms"]},
        "loss": [sum(values) / len(values) for values in zip(*(r["losses"] for r in workers), strict=True)],
        "test_accuracy": _mean([r["accuracy"] for r in workers]),
        "samples_per_s": batch / median * 1e3,
        "syncs_per_s": workers[0]["phases"] / median * 1e3 if len(workers) > 1 else 0.0,
        "synchronised_bytes": workers[0]["synchronised_bytes"],
        "wire_bytes_per_step": max(_serial(record) for record in records) if measured else theory,
        "wire": {"measured": measured, "theory_bytes": theory, "formula": load(strategy).formula},
        "breakdown": {phase: _mean([entry["breakdown"][phase] for entry in entries]) for phase in PHASES},
        "epochs": [_epoch([r["epochs"][i] for r in workers]) for i in range(len(workers[0]["epochs"]))],
        "buffer_divergence": max(r["buffer_divergence"] for r in workers),
        "planned_at": entries[0]["planned_at"],
        "ranks": entries,
    }


def _part(record: Mapping[str, Any]) -> Part:
    clock = record.get("clock")
    spans = [Span.from_row(record["rank"], row) for row in record["spans"]]
    return Part(record["rank"], spans, record["boot_id"], None if clock is None else Clock(**clock))


def _rank(record: Mapping[str, Any], spans: Sequence[Span], whole_from: int) -> dict[str, Any]:
    """`earlier_ms` are the times of the steps before a resume; of these there are no spans, so no shares."""
    series = list(record.get("earlier_ms", ()))
    series += [(s.end - s.start) / 1e6 for s in sorted(spans, key=lambda s: s.step) if s.lane == "step"]
    steps = partition(s for s in spans if s.step >= whole_from) or partition(spans)
    first = min(steps, default=None)
    planned = sorted({s.step + 1 for s in spans if s.name == REPLAN})
    # Until its first plan the engine measures: those steps are start-up, too.
    tuned = {step: phases for step, phases in steps.items() if planned and step >= planned[0]}
    later = {step: phases for step, phases in steps.items() if step != first}
    steady = (tuned if len(tuned) >= _FEWEST else later) or steps
    theory, wire = record["theory"], record.get("wire")
    return {
        "rank": record["rank"],
        "node": record["node"],
        "host": record["host"],
        "step_ms": summary(_steady(series, record.get("resumed_at", ()))),
        "first_step_ms": series[0],
        "step_ms_series": series,
        "loss": record["losses"],
        "test_accuracy": record["accuracy"],
        "breakdown": shares(steady) if steady else dict.fromkeys(PHASES),
        "planned_at": planned,
        "wire": {
            "measured": wire is not None,
            "sent": theory["sent"] if wire is None else wire["sent"],
            "received": theory["received"] if wire is None else wire["received"],
            "theory_sent": theory["sent"],
            "theory_received": theory["received"],
        },
    }


def _steady(series: Sequence[float], resumed_at: Sequence[int]) -> list[float]:
    """Without the first step, and without the first after each resume: both warm up."""
    return [ms for step, ms in enumerate(series) if step and step not in resumed_at] or list(series)


def _serial(record: Mapping[str, Any]) -> float:
    """Measured bytes with both directions at once counted once, in the share that the strategy's theory gives."""
    theory, wire = record["theory"], record["wire"]
    both = theory["sent"] + theory["received"]
    return float((wire["sent"] + wire["received"]) * (theory["serial"] / both if both else 0.5))


def _epoch(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tested = [part["test_s"] for part in parts if part["test_s"] is not None]
    return {
        "epoch": parts[0]["epoch"],
        "train_s": max(part["train_s"] for part in parts),
        "test_s": max(tested) if tested else None,
        "loss": sum(part["loss"] for part in parts) / len(parts),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
