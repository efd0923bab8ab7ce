"""Gathering of the ranks' spans with late ranks and failing clocks."""

import os
import threading
import time

from torch.distributed import HashStore

from syncline.trace import Span
from syncline.trace.formats.load import load
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.merge.rank_file import write_rank_file
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


def test_rank_0_takes_the_spans_of_a_rank_that_has_given_up(tmp_path):
    store, path = HashStore(), tmp_path / "trace.json"
    written = send(recording_of(1, "b"), store, path, world=2, timeout_s=0.05)
    assert written.path == tmp_path / "rank1.spans.jsonl.gz"
    begin = time.monotonic()
    receive(recording_of(0), store, path, world=2, timeout_s=30, metadata={})
    assert time.monotonic() - begin < 15
    source = load(path)
    assert source.ranks == (0, 1)
    assert "rank 1 ran on another host and no clock was measured" in source.notes[0]


def test_a_rank_that_comes_too_late_is_merged_when_the_trace_is_loaded(tmp_path):
    path = tmp_path / "trace.json.gz"
    write_rank_file(recording_of(1).part, tmp_path, world_size=3)
    os.utime(tmp_path / "rank1.spans.jsonl.gz", (1e9, 1e9))
    written = receive(recording_of(0), HashStore(), path, world=3, timeout_s=0.05, metadata={"strategy": "ddp"})
    assert written.notes == ("ranks 1-2 did not arrive in time: not in this trace",)
    assert load(path).notes[0] == written.notes[0]
    assert load(path).ranks == (0,), "the file of an earlier recording is not of this one"
    write_rank_file(recording_of(1).part, tmp_path, world_size=3)
    for source in (load(path), load(tmp_path)):
        assert source.ranks == (0, 1)
        assert source.waits_unknown == "the trace has 2 of 3 ranks"
    assert source.metadata["strategy"] == "ddp"
    assert "rank1.spans.jsonl.gz beside the trace was merged with it" in load(path).notes
    assert "rank 2 did not arrive in time: not in this trace" in load(path).notes


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
