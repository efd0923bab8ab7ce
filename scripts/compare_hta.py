"""Compares our figures of GPU traces with HTA's: `python scripts/compare_hta.py TRACE... [--hta FOLDER] [-o FILE]`.

A trace is a torch.profiler file, or a folder with one file per rank. HTA (Holistic Trace Analysis, on PyPI as
HolisticTraceAnalysis) is not needed by Syncline: `--hta` is a folder that `pip install --target` put it in.
"""

import argparse
import json
import logging
import math
import os
import platform
import sys
import traceback
import warnings
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from syncline.trace.analysis.gpu_use import gpu_use
from syncline.trace.analysis.steps import prepare
from syncline.trace.formats.load import import_files, load
from syncline.trace.gpu_activity import IDLE_KINDS

COLUMNS = ("overlap", "idle", "communication_ms", "compute_ms", "whole_ms", "host wait", "kernel wait", "other wait")


def ours(path: Path) -> dict[int, dict[str, float | None]]:
    """By rank, over all steps; the kinds of idle time are shares of the idle time of all streams."""
    trace = load(path)
    prepared = prepare(trace)
    use = gpu_use(prepared, prepared.steps, trace.metadata)
    if use is None:
        raise SystemExit(f"{path} shows no kernels of a GPU")
    found = {}
    for gpu in use.ranks:
        kinds = {kind: sum(of[kind] for of in gpu.streams.values()) for kind in IDLE_KINDS}
        steps = len(prepared.steps)
        found[gpu.rank] = {
            "overlap": gpu.overlap,
            "idle": gpu.idle_ms / gpu.whole_ms if gpu.whole_ms else 0.0,
            "communication_ms": gpu.communication_ms * steps,
            "compute_ms": gpu.compute_ms * steps,
            "whole_ms": gpu.whole_ms * steps,
            **{kind: ms / (sum(kinds.values()) or 1.0) for kind, ms in kinds.items()},
        }
    return found


def theirs(path: Path, *, exact: bool) -> dict[int, dict[str, float | None]] | str:
    """The same figures as HTA gives them, or its error. The last step is included, as in ours.

    By default HTA shortens every kernel to whole microseconds, from both sides; `exact` switches that off.
    """
    os.environ["HTA_DISABLE_NS_ROUNDING"] = str(int(exact))
    try:
        return _of_hta(path)
    except AssertionError as error:
        return traceback.extract_tb(error.__traceback__)[-1].line or "an assertion"


def _of_hta(path: Path) -> dict[int, dict[str, float | None]]:
    from hta.trace_analysis import TraceAnalysis

    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    by_rank = {next(iter(import_files(file).spans)): str(file.resolve()) for file in files}
    hta = TraceAnalysis(trace_files=by_rank, include_last_profiler_step=True)
    times = hta.get_temporal_breakdown(visualize=False).set_index("rank")
    overlaps = hta.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    found = {}
    for rank in by_rank:
        row = times.loc[rank]
        idle = hta.get_idle_time_breakdown(ranks=[rank], visualize=False)[0].groupby("idle_category")["idle_time"].sum()
        frame = hta.t.get_trace(rank)
        names = hta.t.symbol_table.get_sym_table()
        kernels = frame[frame["stream"].ne(-1)]
        collectives = kernels[[names[name].startswith("nccl") for name in kernels["name"]]]
        overlap = float(overlaps.loc[rank])
        found[rank] = {
            "overlap": None if math.isnan(overlap) else overlap / 100,
            "idle": float(row["idle_time(us)"] / row["kernel_time(us)"]),
            "communication_ms": _union(zip(collectives["ts"], collectives["ts"] + collectives["dur"], strict=True))
            / 1e3,
            "compute_ms": float(row["compute_time(us)"]) / 1e3,
            "whole_ms": float(row["kernel_time(us)"]) / 1e3,
            "host wait": float(idle.get("host_wait", 0.0) / idle.sum()),
            "kernel wait": float(idle.get("kernel_wait", 0.0) / idle.sum()),
            "other wait": float(idle.get("other", 0.0) / idle.sum()),
        }
    return found


def _union(intervals: Any) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return float(total)


def main() -> None:
    """Compare every trace, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--hta", help="the folder that HTA is installed in")
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    if chosen.hta:
        sys.path.append(chosen.hta)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", RuntimeWarning)  # HTA divides by 0 where there are no collectives
    rows = []
    for path in chosen.traces:
        mine, exact, default = ours(path), theirs(path, exact=True), theirs(path, exact=False)
        for rank, figures in mine.items():
            found = {"hta": exact, "hta rounded": default}
            others = {name: of if isinstance(of, str) else of[rank] for name, of in found.items()}
            rows.append({"trace": path.name.partition(".")[0], "rank": rank, "ours": figures, **others})
    print(f"{'trace':14} rank {'':11} " + " ".join(f"{name:>16}" for name in COLUMNS))
    for row in rows:
        for name in ("ours", "hta", "hta rounded"):
            cells = row[name] if isinstance(row[name], str) else " ".join(f"{_cell(row[name][c]):>16}" for c in COLUMNS)
            print(f"{row['trace']:14} {row['rank']:4} {name:11} {cells}")
    if chosen.out:
        folders = {"path": [chosen.hta]} if chosen.hta else {}
        version = next((d.version for d in distributions(name="HolisticTraceAnalysis", **folders)), "")
        head = {"benchmark": "hta", "hta": version, "python": platform.python_version()}
        chosen.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


if __name__ == "__main__":
    main()
