"""How ranks' spans come together where one is late or clocks fail, and what a long recording keeps."""

import threading
import time
from collections import deque

from torch import nn
from torch.distributed import HashStore

import syncline
from syncline.trace import Recorder, Span, collect, usage
from syncline.trace.collect import Seen, _gather, _give
from syncline.trace.merge import Part
from syncline.trace.recorder import process_recorder
from syncline.trace.source import find

COST = {"overhead_ns_per_step": 1.0, "dropped": 0, "every": 1}


def seen(rank, host="a"):
    spans = [Span(rank, "step", "step", "", 0, 0, 10), Span(rank, "forward", "forward", "", 0, 1, 5)]
    return Seen(Part(rank, spans, host), 2, [], COST)


def test_rank_0_does_not_wait_for_a_rank_that_has_given_up(tmp_path):
    store, path = HashStore(), tmp_path / "trace.json"
    written = _give(seen(1), store, path, world=2, timeout_s=0.05)
    assert written.path == tmp_path / "rank1.spans.jsonl.gz"
    begin = time.monotonic()
    written = _gather(seen(0), store, path, world=2, timeout_s=30, about={})
    assert time.monotonic() - begin < 15
    assert written.notes[0] == "rank 1 did not come in time: it is left out"


def test_clocks_that_cannot_be_measured_lose_no_trace(tmp_path, monkeypatch):
    def broken(world, timeout_s):
        raise RuntimeError("timed out")

    monkeypatch.setattr(collect, "_measure", broken)
    store, path, told = HashStore(), tmp_path / "trace.json", []
    other = threading.Thread(
        target=lambda: told.append(_give(seen(1, "b"), store, path, world=2, timeout_s=30)), daemon=True
    )
    other.start()
    _gather(seen(0), store, path, world=2, timeout_s=30, about={})
    other.join(30)
    assert told[0].path is None
    source = find(path)
    assert any("the hosts' clocks could not be measured (timed out)" in note for note in source.notes)
    assert {s.rank for s in source.spans} == {0, 1}


def test_what_a_long_recording_keeps_is_bounded():
    recorder = Recorder()
    assert recorder._steps.maxlen == recorder.usage._rows.maxlen == usage.MOST_STEPS
    recorder._steps = deque(maxlen=3)
    for step in range(5):
        recorder.add("step", "step", step, step + 1, step=step)
    assert [s.step for s in recorder.spans()] == [2, 3, 4]
    assert recorder.counts() == (0, 5)


def test_an_engine_that_closes_files_no_spans():
    model = nn.Linear(2, 2)
    recorder = process_recorder(model.weight.device, engine=False)
    before = recorder.engines
    sync = syncline.attach(model)
    assert recorder.engines == before + 1
    sync.close()
    sync.close()
    assert recorder.engines == before
