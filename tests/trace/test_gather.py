"""Gathering of the ranks' spans with late ranks and failing clocks."""

import threading
import time

from torch.distributed import HashStore

from syncline.trace import Span
from syncline.trace.formats.load import load
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.record import gather
from syncline.trace.record.gather import RankRecording, receive, send

COST = {"overhead_ns_per_step": 1.0, "dropped": 0, "every": 1}


def recording_of(rank, host="a"):
    spans = [Span(rank, "step", "step", "", 0, 0, 10), Span(rank, "forward", "forward", "", 0, 1, 5)]
    return RankRecording(Part(rank, spans, host, cores=2, recording_cost=COST))


def test_a_rank_recording_survives_serialisation():
    part = Part(1, [Span(1, "data", "d", "", 0, 5, 9)], "host", cores=2, cpu_times=[[0, 1, 2]], recording_cost=COST)
    recording = RankRecording(part, "Error: x", ("a note",))
    assert RankRecording.from_bytes(recording.to_bytes()) == recording


def test_rank_0_does_not_wait_for_a_rank_that_has_given_up(tmp_path):
    store, path = HashStore(), tmp_path / "trace.json"
    written = send(recording_of(1), store, path, world=2, timeout_s=0.05)
    assert written.path == tmp_path / "rank1.spans.jsonl.gz"
    begin = time.monotonic()
    written = receive(recording_of(0), store, path, world=2, timeout_s=30, metadata={})
    assert time.monotonic() - begin < 15
    assert written.notes[0] == "rank 1 did not arrive in time and is left out"


def test_the_trace_is_written_if_clocks_cannot_be_measured(tmp_path, monkeypatch):
    def broken(world, timeout_s):
        raise RuntimeError("timed out")

    monkeypatch.setattr(gather, "_measure", broken)
    store, path, written_by_other = HashStore(), tmp_path / "trace.json", []
    other = threading.Thread(
        target=lambda: written_by_other.append(send(recording_of(1, "b"), store, path, world=2, timeout_s=30)),
        daemon=True,
    )
    other.start()
    receive(recording_of(0), store, path, world=2, timeout_s=30, metadata={})
    other.join(30)
    assert written_by_other[0].path is None
    source = load(path)
    assert any("the clocks of the hosts could not be measured (timed out)" in note for note in source.notes)
    assert {s.rank for s in source.spans} == {0, 1}
