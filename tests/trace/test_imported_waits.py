"""Imported torch.profiler traces: waits inside a phase, process groups, and steps on the GPU's clock."""

import shutil
from collections import Counter

import pytest
from trace_files import FIXTURES, NCCL, host, kernel, kineto, launch

from syncline.trace import analyze, load, partition
from syncline.trace.formats.load import import_files

WAITS = FIXTURES / "waits"
LATE_MS = 40


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_is_late_for_the_broadcast_of_buffers_is_the_straggler(backend):
    told = analyze(WAITS / f"batchnorm-{backend}")
    assert told.verdict.kind == "straggler"
    assert told.verdict.sentence.startswith("Rank 0 is late, delayed in data loading")
    assert told.verdict.recoverable_ms == pytest.approx(LATE_MS, rel=0.1)
    waiting = told.ranks[1].breakdown_ms
    assert waiting["wait"] == pytest.approx(LATE_MS, rel=0.1)
    assert waiting["forward"] < 2


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_groups_of_a_mesh_are_matched_apart_and_the_cause_of_a_chain_of_waits_is_found(backend):
    trace = load(WAITS / f"mesh-{backend}")
    groups = {exchange.group: tuple(exchange.joined) for exchange in trace.exchanges}
    assert groups == {
        "1 (ranks 0-1)": (0, 1),
        "2 (ranks 2-3)": (2, 3),
        "3 (ranks 0, 2)": (0, 2),
        "4 (ranks 1, 3)": (1, 3),
    }
    assert backend == "nccl" or trace.notes == ("ranks 0-3 ran on host vm: its clock was taken as it is",)
    told = analyze(trace)
    assert told.verdict.sentence.startswith("Rank 3 is late, delayed in data loading")
    # The four ranks of the GPU share it in turn, so that a part of the delay hides behind the others' transfers.
    assert told.verdict.recoverable_ms == pytest.approx(LATE_MS, rel=0.05 if backend == "gloo" else 0.35)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_of_a_recording_on_gpus_is_found_though_the_host_waits_between_steps(late):
    told = analyze(WAITS / "recorded-cuda" / f"late-{late}.json.gz")
    assert told.verdict.kind == "straggler"
    assert told.verdict.sentence.startswith(f"Rank {late} is late, delayed in the time between steps")
    assert told.verdict.recoverable_ms == pytest.approx(30, rel=0.1)
    assert told.ranks[1 - late].breakdown_ms["between"] < 1, "the GPU was waiting meanwhile"


def step(number, start, end):
    return host(f"ProfilerStep#{number}", start, end, cat="user_annotation")


def ahead_of_its_gpu(path):
    """A host that is 3 ms ahead of its GPU, in microseconds: kernels run when their step is over on the host."""
    events = [launch(-100, 1), kernel("warm-up", 500, 2900, 1)]
    for number in range(4):
        at = 1000 * number
        events += [step(number, at, at + 990), host("aten::mm", at + 10, at + 100), launch(at + 20, 10 + number)]
        events.append(kernel("gemm", 3000 + 1000 * number, 3900 + 1000 * number, 10 + number))
    return kineto(path, events)


def test_steps_end_when_their_kernels_end_and_work_launched_before_the_first_does_not_count(tmp_path):
    found = import_files(ahead_of_its_gpu(tmp_path / "t.json"))
    spans = found.spans[0]
    base = 1_000_000_000
    bounds = [((s.start - base) / 1000, (s.end - base) / 1000) for s in spans if s.lane == "step"]
    assert bounds == [(2900, 3900), (3900, 4900), (4900, 5900), (5900, 6900)]
    assert [s.step for s in spans if s.name == "gemm"] == [0, 1, 2, 3]
    assert not [s for s in spans if s.name == "warm-up"]
    assert "1 span before its first or after its last step: left out" in found.notes
    for phases in partition(spans).values():
        assert phases["forward"] == 900_000
        assert sum(phases.values()) == 1_000_000


def test_kernels_whose_launch_was_before_the_profile_are_in_no_step(tmp_path):
    # A real trace: the profiler started while NCCL's kernels of the step before still ran.
    for path in NCCL:
        shutil.copy(path, tmp_path)
    trace = load(tmp_path)
    for rank in trace.ranks:
        sent = Counter(s.step for s in trace.spans if s.rank == rank and s.lane == "exchange")
        assert sent == {3: 3, 4: 3, 5: 3}
    told = analyze(trace)
    assert told.step_ms["p95"] < 1.05 * told.step_ms["median"], "the first step was 1.6 times as long as the others"


@pytest.mark.parametrize("folder", ["batchnorm-gloo", "mesh-gloo", "batchnorm-nccl", "mesh-nccl"])
def test_no_figure_contradicts_another(folder):
    told = analyze(WAITS / folder)
    step_ms = told.step_ms["usual"]
    assert sum(told.breakdown_ms.values()) == pytest.approx(step_ms)
    assert sum(told.breakdown.values()) == pytest.approx(1)
    assert told.bound.distance >= 0
    assert all(finding.recoverable_ms <= step_ms for finding in told.findings)
    assert all(late.wait_ms <= step_ms for late in told.late)
    assert told.startup.steady_ms == pytest.approx(step_ms)
