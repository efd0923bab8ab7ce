"""How ranks' spans come together where one is late or clocks fail, and what a long recording keeps."""

import struct
import threading
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

import syncline
from syncline.trace import Recorder, Span
from syncline.trace.formats.load import find
from syncline.trace.merge.merge import Part
from syncline.trace.record import cpu_time, gather
from syncline.trace.record.cuda_clock import CudaClock
from syncline.trace.record.gather import RankRecording, receive, send
from syncline.trace.record.recorder import process_recorder

COST = {"overhead_ns_per_step": 1.0, "dropped": 0, "every": 1}


def seen(rank, host="a"):
    spans = [Span(rank, "step", "step", "", 0, 0, 10), Span(rank, "forward", "forward", "", 0, 1, 5)]
    return RankRecording(Part(rank, spans, host), 2, [], COST)


def test_rank_0_does_not_wait_for_a_rank_that_has_given_up(tmp_path):
    store, path = HashStore(), tmp_path / "trace.json"
    written = send(seen(1), store, path, world=2, timeout_s=0.05)
    assert written.path == tmp_path / "rank1.spans.jsonl.gz"
    begin = time.monotonic()
    written = receive(seen(0), store, path, world=2, timeout_s=30, metadata={})
    assert time.monotonic() - begin < 15
    assert written.notes[0] == "rank 1 did not arrive in time and is left out"


def test_clocks_that_cannot_be_measured_lose_no_trace(tmp_path, monkeypatch):
    def broken(world, timeout_s):
        raise RuntimeError("timed out")

    monkeypatch.setattr(gather, "_measure", broken)
    store, path, told = HashStore(), tmp_path / "trace.json", []
    other = threading.Thread(
        target=lambda: told.append(send(seen(1, "b"), store, path, world=2, timeout_s=30)), daemon=True
    )
    other.start()
    receive(seen(0), store, path, world=2, timeout_s=30, metadata={})
    other.join(30)
    assert told[0].path is None
    source = find(path)
    assert any("the clocks of the hosts could not be measured (timed out)" in note for note in source.notes)
    assert {s.rank for s in source.spans} == {0, 1}


def test_what_a_long_recording_keeps_is_bounded():
    recorder = Recorder()
    assert recorder._steps.maxlen == recorder.cpu_times._rows.maxlen == cpu_time.MAX_STEPS
    recorder._steps = deque(maxlen=3)
    for step in range(5):
        recorder.add("step", "step", step, step + 1, step=step)
    assert [s.step for s in recorder.spans()] == [2, 3, 4]
    assert recorder.counts() == (0, 5)


def test_an_engine_that_closes_files_no_spans():
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
    """As a CUDA event tells its distance from another: milliseconds as a float of 32 bits."""

    def __init__(self, ms):
        self.ms = ms

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return struct.unpack("f", struct.pack("f", other.ms - self.ms))[0]


def test_events_are_read_as_finely_after_hours():
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
    # Steps that are all equally long are all rounded the same way; this is still less than a float's last bit.
    assert spans[2].start == pytest.approx(1_000_000 + 777_777_000 * 19_999, abs=600_000)
    assert spans[0].start - spans[2].start == pytest.approx(100_000, abs=100)
