import gzip
import itertools
import json
import struct
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from trace_files import chrome_trace

import syncline
from syncline.trace import Recorder, Span, Trace
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.record.cpu_time import MAX_STEPS
from syncline.trace.record.cuda_clock import CudaClock
from syncline.trace.record.recorder import process_recorder
from syncline.trace.span import BLOCKED, ISSUING


def test_spans_are_recorded_in_order_with_step_unit_and_bytes():
    recorder = Recorder(rank=3)
    recorder.step = 7
    with recorder.span("exchange", "all-reduce", unit="conv1", bytes=12):
        pass
    (span,) = recorder.spans()
    assert (span.rank, span.lane, span.name, span.unit, span.step, span.bytes) == (
        3,
        "exchange",
        "all-reduce",
        "conv1",
        7,
        12,
    )
    assert span.end >= span.start


def test_a_span_is_recorded_when_its_block_fails():
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.span("forward"):
        raise KeyError
    assert len(recorder.spans()) == 1


def test_time_in_which_messages_are_issued_is_cut_out_of_compute_and_blocked_time_out_of_both():
    recorder = Recorder()
    recorder.add("backward", "backward", 0, 100)
    recorder.add("wait", ISSUING, 20, 60)
    recorder.add_blocked(30, 50)
    recorder.add("wait", ISSUING, 40, 70)
    recorder.add("update", "update", 0, 100, unit="of a worker")
    found = [(s.lane, s.name, s.start, s.end) for s in recorder.spans()]
    assert [row[2:] for row in found if row[0] == "backward"] == [(0, 20), (70, 100)]
    assert sorted(row[2:] for row in found if row[1] == ISSUING) == [(20, 30), (50, 60), (50, 70)]
    assert ("wait", BLOCKED, 30, 50) in found
    assert ("update", "update", 0, 100) in found


def test_the_ring_buffer_is_bounded_and_counts_dropped_spans():
    recorder = Recorder(capacity=3)
    for i in range(5):
        recorder.add("data", str(i), i, i + 1)
    assert [s.name for s in recorder.spans()] == ["2", "3", "4"]
    assert recorder.dropped == 2


def test_a_disabled_recorder_records_nothing():
    recorder = Recorder(enabled=False)
    with recorder.span("data"):
        pass
    assert recorder.spans() == []


def test_lane_totals_of_a_step():
    recorder = Recorder()
    recorder.step = 1
    recorder.add("forward", "f", 0, 5)
    recorder.step = 2
    recorder.add("forward", "f", 10, 12)
    recorder.add("forward", "f", 12, 15)
    assert recorder.lane_ns(2) == {2: {"forward": 5}}
    assert recorder.lane_ns(1) == {1: {"forward": 5}, 2: {"forward": 5}}


def test_step_times_are_kept_when_spans_are_dropped():
    recorder = Recorder(capacity=4)
    for step in range(5):
        recorder.step = step
        recorder.add("forward", "f", step * 10, step * 10 + 4)
        recorder.add("update", "u", step * 10 + 4, step * 10 + 6)
        recorder.add("step", "step", step * 10, step * 10 + 10)
    spans = recorder.spans()
    assert [s.step for s in spans if s.lane == "step"] == [0, 1, 2, 3, 4]
    assert recorder.first_complete_step == 4, "one span of step 3 may be missing"
    assert recorder.lane_ns(4) == {4: {"forward": 4, "update": 2, "step": 10}}


def test_chrome_trace_never_overlaps_on_a_track(tmp_path):
    spans = [
        Span(0, "exchange", "e", str(i), 0, start, end) for i, (start, end) in enumerate([(0, 50), (10, 30), (40, 60)])
    ]
    trace = chrome_trace(Trace.of(spans, split=False))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    by_track = {}
    for event in events:
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_track) == 2
    for intervals in by_track.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(intervals))
    write_chrome_trace(Trace.of(spans, split=False), tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == trace


@pytest.mark.gpu
def test_cuda_spans_come_from_events():
    recorder = Recorder(device="cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    with recorder.span("forward"):
        for _ in range(20):
            matrix = matrix @ matrix / 64
    with recorder.span("update"):
        matrix.add_(1)
    forward, update = recorder.spans()
    assert forward.end - forward.start > 10 * (update.end - update.start)
    assert update.start >= forward.end


@pytest.mark.gpu
def test_the_ends_of_a_groups_collectives_are_marked_on_one_stream(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        recorder, gradient = Recorder(device="cuda"), torch.ones(1 << 20, device="cuda")
        for name in ("first", "second"):
            start = recorder.mark("exchange")
            future = dist.all_reduce(gradient, async_op=True).get_future()
            end = recorder.mark_completion(future, gradient.device, "world")
            recorder.add("exchange", name, start, end)
        assert len(recorder._cuda.completion_streams) == 1, "one stream for all operations that end in order"
        first, second = recorder.spans()
        assert first.start <= first.end <= second.end
        assert second.end > second.start
        other = torch.device("cuda", 1)
        assert recorder.mark_completion(future, other) is None, "the computing stream there must not wait"
    finally:
        dist.destroy_process_group()


def test_on_cpu_the_future_itself_reports_its_end():
    future = torch.futures.Future()
    future.set_result(None)
    assert Recorder().mark_completion(future, torch.device("cpu")) is None


def test_a_blocked_training_thread_is_cut_out_of_its_own_spans():
    recorder = Recorder()
    recorder.add("forward", "forward", 0, 100)
    recorder.add("update", "update", 5, 95, unit="fc")
    recorder.add_blocked(20, 50)
    recorder.add_blocked(60, 70)
    recorder.add("backward", "backward", 100, 200)
    spans = [(s.lane, s.start, s.end) for s in recorder.spans() if s.lane != "wait"]
    assert spans == [
        ("forward", 0, 20), ("forward", 50, 60), ("forward", 70, 100), ("update", 5, 95), ("backward", 100, 200),
    ]  # fmt: skip
    assert recorder.lane_ns(0)[0] == {"forward": 60, "update": 90, "backward": 100, "wait": 40}


def test_the_memory_of_a_long_recording_is_bounded():
    recorder = Recorder()
    assert recorder._steps.maxlen == recorder.cpu_times._rows.maxlen == MAX_STEPS
    recorder._steps = deque(maxlen=3)
    for step in range(5):
        recorder.add("step", "step", step, step + 1, step=step)
    assert [s.step for s in recorder.spans()] == [2, 3, 4]
    assert recorder.counts() == (0, 5)


def test_a_closed_engine_is_not_counted():
    model = nn.Linear(2, 2)
    recorder = process_recorder(model.weight.device, engine=False)
    before = recorder.engines
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        sync = syncline.attach(model)
        assert recorder.engines == before + 1
        sync.close()
        sync.close()
        assert recorder.engines == before
    finally:
        dist.destroy_process_group()


class Event:
    """A CUDA event that measures distances as float32 milliseconds."""

    def __init__(self, ms):
        self.ms = ms

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return struct.unpack("f", struct.pack("f", other.ms - self.ms))[0]


def test_event_times_stay_accurate_after_hours():
    recorder, base = Recorder(), 12_345.678
    recorder._cuda = CudaClock(torch.device("cuda:0"))
    recorder._cuda.base = Event(base), 1_000_000
    for step in range(20_000):  # of 777.777 ms: four hours
        begin = base + 777.777 * step
        recorder.add("forward", "f", Event(begin + 0.1), Event(begin + 0.2), step=step)
        recorder.add("update", "u", Event(begin + 0.4), Event(begin + 0.3), step=step)
        recorder.add("step", "step", Event(begin), Event(begin + 777.777), step=step)
        if step in (5_000, 5_001):
            recorder.spans(step)
    spans = [s for s in recorder.spans() if s.step == 19_999]
    assert [s.end - s.start for s in spans] == pytest.approx([100_000, 0, 777_777_000], abs=100)
    # Equally long steps are all rounded the same way; the sum is still less than the last bit of a float32.
    assert spans[2].start == pytest.approx(1_000_000 + 777_777_000 * 19_999, abs=600_000)
    assert spans[0].start - spans[2].start == pytest.approx(100_000, abs=100)
