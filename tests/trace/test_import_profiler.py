"""Import of torch.profiler traces: real ones of two Gloo and of two NCCL ranks, and GPU traces written by hand."""

import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from trace_files import GLOO, NCCL, device_work, hidden_share, host, kernel, kineto, lanes, launch, raw

from syncline.errors import UsageError
from syncline.trace import Span, Trace, overlap, partition
from syncline.trace.analysis.analyze import analyze
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.formats.load import import_files, load

COMPUTE = ("forward", "backward", "update")
GPU = Path(__file__).parent / "fixtures" / "gpu"


def test_a_real_gloo_run_has_its_ranks_steps_lanes_and_messages(tmp_path):
    for path in GLOO:
        shutil.copy(path, tmp_path)
    found = import_files(tmp_path)
    assert (found.kind, tuple(found.spans)) == ("torch.profiler", (0, 1))
    assert found.notes == ("ranks 0-1 ran on host vm: its clock was taken as it is",)
    weights = [4 * (512 * 512 + 512) for _ in range(3)]
    for rank in found.spans:
        spans = found.spans[rank]
        assert [s.step for s in spans if s.lane == "step"] == [3, 4, 5]
        for step in (3, 4, 5):
            mine = [s for s in spans if s.step == step]
            assert {s.lane for s in mine} == {"step", "data", "forward", "backward", "exchange", "update"}
            sent = {s.unit: (s.name, s.bytes) for s in mine if s.lane == "exchange"}
            assert sent == {
                "collective 0": ("all-reduce", weights[0] + 4 * (10 * 512 + 10)),
                "collective 1": ("all-reduce", weights[1]),
                "collective 2": ("all-reduce", weights[2]),
            }
        for phases in partition(spans).values():
            assert all(phases[name] for name in (*COMPUTE, "data"))
            assert phases["other"] < 0.35 * sum(phases.values())


@pytest.mark.parametrize("path", GLOO, ids=["rank 0", "rank 1"])
def test_overlap_of_a_real_run_equals_that_of_intervals(path):
    spans = next(iter(import_files(path).spans.values()))
    found = overlap(spans)
    assert found == pytest.approx(_by_breakpoints(spans), abs=1e-12)
    # From the file itself, microsecond by microsecond, without the Python between two ops.
    assert found == pytest.approx(_from_the_file(raw(path)), abs=0.03)
    assert 0.02 < found < 0.98


def test_a_real_nccl_run_has_its_ranks_steps_lanes_and_messages(tmp_path):
    for path in NCCL:
        shutil.copy(path, tmp_path)
    found = import_files(tmp_path)
    assert (found.kind, tuple(found.spans), found.aligned) == ("torch.profiler", (0, 1), True)
    # Torch 2.11 names no host, so that the ranks' clocks are compared, though they ran on one machine.
    (note,) = [note for note in found.notes if "left out" not in note]
    assert re.fullmatch(r"the clock of rank 1 was set back by 2\.\d+ ms: 9 collectives end .* 0\.0\d+ ms", note)
    layer = 4 * (512 * 512 + 512)
    for rank in found.spans:
        spans = found.spans[rank]
        assert [s.step for s in spans if s.lane == "step"] == [3, 4, 5]
        for step in (3, 4, 5):
            mine = [s for s in spans if s.step == step]
            assert {s.lane for s in mine} == {"step", "data", "forward", "backward", "exchange", "update"}
            sent = [(s.name, s.unit, s.bytes) for s in mine if s.lane == "exchange"]
            # The GPU lags behind its host: kernels of the step before the profile run in the first one.
            sizes = [layer + 4 * (10 * 512 + 10), layer, layer]
            assert sent == [("all-reduce", f"collective {i}", size) for i, size in enumerate(sizes)]
        bounds = {s.step: s.end - s.start for s in spans if s.lane == "step"}
        assert {step: sum(phases.values()) for step, phases in partition(spans).items()} == bounds


@pytest.mark.parametrize("rank", [0, 1])
def test_overlap_of_a_real_nccl_run_is_that_of_its_kernels(rank):
    found = overlap(import_files(NCCL[rank]).spans[rank])
    transfers, work = device_work(NCCL[rank])
    assert len(transfers) == 9
    assert found == pytest.approx(hidden_share(transfers, work), rel=0.001)
    assert 0.001 < found < 0.02, "two ranks take turns on one GPU: next to nothing runs beside a transfer"


def _by_breakpoints(spans):
    times = np.unique([t for s in spans for t in (s.start, s.end)])
    middle, length = (times[1:] + times[:-1]) / 2, np.diff(times)
    active = {
        name: np.any([(s.start < middle) & (middle < s.end) for s in spans if s.lane in group], axis=0)
        for name, group in (("exchange", ("exchange",)), ("compute", COMPUTE))
    }
    return length[active["exchange"] & active["compute"]].sum() / length[active["exchange"]].sum()


def _from_the_file(trace):
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and isinstance(e["tid"], int)]
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    begin = min(e["ts"] for e in steps)
    size = int(max(e["ts"] + e["dur"] for e in steps) - begin) + 1
    exchange, compute, calls = (np.zeros(size, bool) for _ in range(3))
    for event in events:
        name = event["name"]
        place = slice(max(0, round(event["ts"] - begin)), max(0, round(event["ts"] + event["dur"] - begin)))
        if name.startswith("gloo:"):
            exchange[place] = True
        elif event["tid"] == steps[0]["tid"] and name.startswith("c10d::"):
            calls[place] = True
        elif event["tid"] == steps[0]["tid"] and not name.startswith(("ProfilerStep", "enumerate")):
            compute[place] = True
    return (exchange & compute & ~calls).sum() / exchange.sum()


def test_a_truncated_or_missing_rank_is_reported_and_the_rest_loaded(tmp_path):
    shutil.copy(GLOO[0], tmp_path)
    (tmp_path / "gloo-rank1.json.gz").write_bytes(GLOO[1].read_bytes()[:9000])
    (tmp_path / "other.json").write_text('{"runs": []}')
    found = import_files(tmp_path)
    assert tuple(found.spans) == (0,)
    told = "\n".join(found.notes)
    assert "gloo-rank1.json.gz ends after" in told
    assert "compressed data ends early" in told
    assert "other.json is not a trace of torch.profiler, horovod, syncline" in told
    assert "of 2 ranks, 1 has no trace here: 1" in told
    with pytest.raises(UsageError, match="export it again"):
        import_files(tmp_path / "gloo-rank1.json.gz")


def test_ranks_of_two_hosts_are_aligned_by_their_collectives(tmp_path):
    trace = raw(GLOO[1])
    trace["host_name"], trace["baseTimeNanoseconds"] = "another", trace["baseTimeNanoseconds"] + 5_000_000_000
    (tmp_path / "rank1.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    shutil.copy(GLOO[0], tmp_path / "rank0.json.gz")
    found, true = import_files(tmp_path), import_files(GLOO)
    assert [note[:41] for note in found.notes] == ["the clock of rank 1 was set back by 5000."]
    shift = found.spans[1][0].start - true.spans[1][0].start
    assert abs(shift) < 2_000_000
    assert {s.start - t.start for s, t in zip(found.spans[1], true.spans[1], strict=True)} == {shift}
    assert any(s.lane == "wait" for s in Trace.of([*found.spans[0], *found.spans[1]]).spans)


def test_collectives_that_start_in_another_order_are_matched_by_size(tmp_path):
    for rank, order in enumerate(((4, 8), (8, 4))):
        events = [host("ProfilerStep#0", 0, 100, cat="user_annotation")]
        for i, size in enumerate(order):
            shape = {"Input Dims": [[size]], "Input type": ["float"]}
            events.append(host("gloo:all_reduce", 10 + i, 50, cat="user_annotation", tid=8 + i, **shape))
        kineto(tmp_path / f"r{rank}.json", events, rank=rank, world=2)
    found = import_files(tmp_path)
    units = [{s.bytes: s.unit for s in found.spans[rank] if s.lane == "exchange"} for rank in (0, 1)]
    assert units[0] == units[1] == {16: "collective 0", 32: "collective 1"}


def test_kernels_take_the_lane_of_their_launch_and_nccl_kernels_are_exchanges(tmp_path):
    note = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "BFloat16"}
    events = [
        host("ProfilerStep#4", 0, 1000, cat="user_annotation"),
        host("ProfilerStep#4", 0, 1000, cat="gpu_user_annotation", tid=1),
        host("enumerate(DataLoader)#_It.__next__", 1, 20, cat="user_annotation"),
        host("aten::to", 21, 25), {**kernel("Memcpy HtoD (Pageable -> Device)", 25, 40, 1), "cat": "gpu_memcpy"},
        host("DistributedDataParallel.forward", 30, 90, cat="user_annotation"), launch(40, 2), launch(50, 3),
        host("autograd::engine::evaluate_function: MmBackward0", 100, 200, tid=8), launch(110, 4, tid=8),
        host("nccl:all_reduce", 150, 160, cat="user_annotation", tid=8), launch(155, 5, tid=8),
        host("Optimizer.step#SGD.step", 300, 400, cat="user_annotation"), launch(310, 6),
        launch(22, 1), kernel("gemm", 60, 160, 2), kernel("relu", 161, 200, 3), kernel("gemm", 200, 500, 4),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 400, 800, 5, **note),
        kernel("sgd", 800, 900, 6),
    ]  # fmt: skip
    found = import_files(kineto(tmp_path / "t.json", events, rank=3, world=4))
    assert lanes(found.spans[3]) == [
        ("step", 0, 900), ("data", 1, 20), ("data", 25, 40), ("forward", 60, 160), ("forward", 161, 200),
        ("backward", 200, 500), ("exchange", 400, 800), ("update", 800, 900),
    ]  # fmt: skip
    (sent,) = [s for s in found.spans[3] if s.lane == "exchange"]
    assert (sent.name, sent.bytes, sent.step) == ("all-reduce", 200, 4)
    assert overlap(found.spans[3]) == 0.25
    assert found.notes == ("of 4 ranks, 3 have no trace here: 0, 1, 2",)


def test_ops_outside_any_range_get_the_lane_of_their_neighbours(tmp_path):
    def step(at):
        return [
            host(f"ProfilerStep#{at // 10_000}", at, at + 9_000, cat="user_annotation"),
            host("## forward ##", at + 1, at + 100, cat="user_annotation"), host("aten::loss", at + 2_000, at + 2_100),
            host("autograd::engine::evaluate_function: X", at + 3_000, at + 4_000),
            host("c10d::allreduce_", at + 3_500, at + 3_600), host("aten::as_strided", at + 5_000, at + 5_100),
            host("torch.distributed.ddp.reducer::copy_bucket_to_grad", at + 5_100, at + 5_200),
            host("aten::norm", at + 6_000, at + 6_100), host("Optimizer.step#A.step", at + 7_000, at + 8_000),
        ]  # fmt: skip

    found = import_files(kineto(tmp_path / "t.json", step(0) + step(10_000)))
    one = [
        ("step", 0, 9000), ("forward", 1, 100), ("forward", 2000, 2100), ("backward", 3000, 3500),
    ]  # fmt: skip
    spans = [row for row in lanes(found.spans[0]) if row[1] < 9000 and row[0] != "exchange"]
    assert spans == [
        *one, ("backward", 3600, 4000), ("backward", 5000, 5200), ("update", 6000, 6100), ("update", 7000, 8000),
    ]  # fmt: skip
    assert [s.step for s in found.spans[0]] == [0] * 9 + [1] * 9
    assert "only the calls" in found.notes[0], "no range of a backend says how long the transfer took"


def test_a_trace_without_steps_is_one_step_and_says_so(tmp_path):
    found = import_files(kineto(tmp_path / "t.json", [host("aten::mm", 5, 9), host("Optimizer.step#S.step", 20, 30)]))
    assert lanes(found.spans[0]) == [("step", 0, 25), ("forward", 0, 4), ("update", 15, 25)]
    assert any("no ProfilerStep ranges" in note for note in found.notes)
    assert any("no collectives" in note for note in found.notes)


@pytest.mark.parametrize("path", [GLOO[0], GLOO[1], NCCL[0], NCCL[1]], ids=lambda path: path.name)
@pytest.mark.parametrize("optimizer", [True, False])
def test_steps_of_a_real_run_are_found_without_their_marks(tmp_path, path, optimizer):
    content = raw(path)
    left_out = ("ProfilerStep#",) if optimizer else ("ProfilerStep#", "Optimizer.")
    kept = [event for event in content["traceEvents"] if not str(event.get("name")).startswith(left_out)]
    (tmp_path / "t.json").write_text(json.dumps({**content, "traceEvents": kept}))
    (marked,), (found,) = import_files(path).spans.values(), import_files(tmp_path / "t.json").spans.values()
    true, guessed = ([(s.start, s.end) for s in spans if s.lane == "step"] for spans in (marked, found))
    assert len(guessed) in (len(true), len(true) - 1), "the last step may have no end"
    for (start, end), (begin, until) in zip(guessed, true, strict=False):
        assert min(end, until) - max(start, begin) > 0.6 * (until - begin)
    assert any("steps were found by the work that repeats" in note for note in import_files(tmp_path / "t.json").notes)


def test_a_trace_of_the_gpu_alone_has_the_steps_of_the_whole_trace(tmp_path):
    """Work counts in the step in which it was launched, also where steps were found by kernels: none is left out."""
    path = GPU / "ddp-rank0.json.gz"
    content = raw(path)
    on_host = ("cpu_op", "user_annotation", "python_function")
    kept = [event for event in content["traceEvents"] if event.get("cat") not in on_host]
    (tmp_path / "t.json").write_text(json.dumps({**content, "traceEvents": kept}))
    whole, alone = (analyze(load(one)) for one in (path, tmp_path / "t.json"))
    assert alone.verdict.kind == whole.verdict.kind == "bandwidth-bound"
    assert alone.step_ms["usual"] == pytest.approx(whole.step_ms["usual"], rel=0.02)
    assert alone.gpu.ranks[0].idle_ms / alone.gpu.ranks[0].whole_ms == pytest.approx(
        whole.gpu.ranks[0].idle_ms / whole.gpu.ranks[0].whole_ms, abs=0.02
    )


def test_events_without_a_sound_time_are_the_stated_reason(tmp_path):
    step, op = host("ProfilerStep#0", 0, 99, cat="user_annotation"), host("aten::mm", 5, 9)
    wrong = [{**op, "ts": None}, {**op, "ts": 1e300}, {**op, "dur": -5}, {**op, "ts": "12"}]
    found = import_files(kineto(tmp_path / "t.json", [step, op, *wrong]))
    assert "4 events with a missing, negative or impossible time: left out" in found.notes
    with pytest.raises(
        UsageError, match=r"nothing that can be analysed: .*4 events with a missing, negative or impossible"
    ):
        import_files(kineto(tmp_path / "t.json", wrong))


def test_operators_of_the_host_are_kept_by_step():
    trace = load(GLOO)
    rows = trace.metadata["operators"]["0"]
    assert {step for step, _, _ in rows} <= {3, 4, 5}
    assert {"aten::linear", "aten::relu"} & {name for _, name, _ in rows}
    assert all(ns > 0 for _, _, ns in rows)


def test_files_without_a_rank_get_one_from_name_or_process(tmp_path):
    for name in ("host_20.1.pt.trace.json", "host_9.2.pt.trace.json", "worker5.json"):
        pid = int(re.search(r"\d+", name)[0])
        events = [{**host("ProfilerStep#0", 0, 9, cat="user_annotation"), "pid": pid}]
        (tmp_path / name).write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*events, host("aten::mm", 1, 5)]}))
    found = import_files(tmp_path)
    assert tuple(found.spans) == (0, 1, 5)
    assert "host_9.2.pt.trace.json does not say its rank: taken as 0, by the order of processes" in found.notes


def test_several_files_of_a_rank_are_joined_unless_they_repeat_steps(tmp_path):
    for name, step in (("a.json", 0), ("b.json", 1), ("c.json", 1)):
        events = [
            host(f"ProfilerStep#{step}", step * 10, step * 10 + 9, cat="user_annotation"),
            host("x", step * 10, step * 10 + 5),
        ]
        kineto(tmp_path / name, events)
    found = import_files(tmp_path)
    assert [s.step for s in found.spans[0] if s.lane == "step"] == [0, 1]
    assert any("c.json has steps of rank 0 that a.json has too" in note for note in found.notes)


def test_our_own_trace_comes_back(tmp_path):
    spans = [Span(r, lane, lane, "fc", 2, i * 10, i * 10 + 5, 7) for r in (0, 1) for i, lane in enumerate(COMPUTE)]
    write_chrome_trace(Trace.of(spans, split=False), tmp_path / "trace.json.gz")
    found = import_files(tmp_path / "trace.json.gz")
    assert (found.kind, found.spans) == ("syncline", {r: [s for s in spans if s.rank == r] for r in (0, 1)})


def test_unreadable_input_gives_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="not a file"):
        import_files(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match=r"holds no trace.*\.json"):
        import_files(tmp_path)
    with pytest.raises(UsageError, match="no trace was given"):
        import_files([])
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UsageError, match="none of its events is known"):
        import_files(tmp_path)
    with pytest.raises(UsageError, match="two formats"):
        import_files([GLOO[0], GLOO[0].parent / "horovod-timeline.json"])
