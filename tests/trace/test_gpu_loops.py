"""Real GPU loops with a known cause, cut from recordings on an H200: the verdict, the gain, and HTA's figures."""

import json
from pathlib import Path

import pytest
from trace_files import FIXTURES

from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.gpu_use import gpu_use
from syncline.trace.analysis.steps import prepare
from syncline.trace.formats.load import load

LOOPS = FIXTURES / "gpu"
HTA = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "hta.json").read_text())


@pytest.mark.parametrize("name", ["host-bound", "sync-bound", "input-bound"])
def test_the_verdict_is_the_cause(name):
    found = analyze(load(LOOPS / f"{name}.json.gz"))
    assert found.verdict.kind == name
    assert "unrecorded" not in found.verdict.sentence


def test_a_loop_that_keeps_its_gpu_busy_is_compute_bound():
    found = analyze(load(LOOPS / "healthy.json.gz"))
    assert (found.verdict.kind, found.findings) == ("compute-bound", ())
    assert "By class of kernel: matmul" in found.verdict.sentence, "it says which compute takes long"
    assert found.gpu.ranks[0].idle_ms < 0.05 * found.step_ms["mean"]
    assert next(iter(found.gpu.classes)) == "matmul"
    assert "attention" in found.gpu.classes
    # Gaps of a microsecond between kernels do not cut the path into pieces.
    assert [piece.lane for piece in found.critical_path if piece.ms > 1] == ["forward", "backward", "update"]


def test_a_wait_for_the_gpu_costs_what_the_analysis_says():
    """The same model and data with and without checks for NaN on the host; their kernels are not gained."""
    slow, quick = (analyze(load(LOOPS / f"{name}.json.gz")) for name in ("sync-bound", "healthy"))
    (first, *_) = slow.gpu.blocked
    assert first.doing.startswith("aten::is_nonzero (cuda")
    checks = slow.gpu.ranks[0].compute_ms + slow.gpu.ranks[0].copies_ms
    checks -= quick.gpu.ranks[0].compute_ms + quick.gpu.ranks[0].copies_ms
    gained = slow.step_ms["mean"] - quick.step_ms["mean"] - checks
    assert slow.verdict.recoverable_ms == pytest.approx(gained, rel=0.2)


def test_the_gaps_of_a_host_bound_loop_are_named():
    found = analyze(load(LOOPS / "host-bound.json.gz"))
    assert found.gpu.ranks[0].idle_ms > 0.8 * found.step_ms["mean"]
    names = {row.doing for row in found.gpu.gaps[:6]}
    assert {"aten::linear", "Python in the backward pass"} <= names
    assert found.verdict.recoverable_ms == pytest.approx(found.step_ms["mean"] - found.gpu.ranks[0].compute_ms, rel=0.1)


@pytest.mark.parametrize("row", HTA["rows"], ids=lambda row: f"{row['trace']}-{row['rank']}")
def test_overlap_idle_and_communication_time_are_those_of_hta(row):
    """Against the figures that scripts/compare_hta.py got from HTA for the same files."""
    found = [path for path in (*LOOPS.glob("*.gz"), *FIXTURES.glob("nccl*.gz")) if path.name.startswith(row["trace"])]
    trace = load(found[0])
    prepared = prepare(trace)
    (gpu,) = gpu_use(prepared, prepared.steps, trace.metadata).ranks
    steps, hta = len(prepared.steps), row["hta"]
    assert gpu.overlap == (None if hta["overlap"] is None else pytest.approx(hta["overlap"], abs=0.01))
    assert gpu.idle_ms / gpu.whole_ms == pytest.approx(hta["idle"], abs=0.01)
    assert gpu.communication_ms * steps == pytest.approx(hta["communication_ms"], rel=0.01)
    assert gpu.compute_ms * steps == pytest.approx(hta["compute_ms"], rel=0.01)
