"""Merging ranks: clocks, exchanges, and rank files that are missing or broken."""

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.trace import Span
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge_ranks import Part, merge
from syncline.trace.merge.rank_file import merge_folder, rank_file_name, read_rank_file, write_rank_file

AHEAD = Clock(offset=1000.0, error=3.0, at=0)


def exchange(rank, start, end):
    return Span(rank, "exchange", "all-reduce", "w", 0, start, end, 8)


def lanes(merged, rank):
    return [(s.lane, s.start, s.end) for s in merged.spans if s.rank == rank]


def test_ranks_of_another_host_are_aligned_to_rank_0_and_waits_are_split():
    merged = merge([Part(1, [exchange(1, 1050, 1090)], "b", AHEAD), Part(0, [exchange(0, 10, 90)], "a", Clock())])
    assert lanes(merged, 0) == [("wait", 10, 50), ("exchange", 50, 90)]
    assert lanes(merged, 1) == [("exchange", 50, 90)]
    assert (merged.clock_error_ns, merged.notes) == (3.0, ())


def test_ranks_of_rank_0s_host_are_unchanged():
    merged = merge([Part(0, [exchange(0, 10, 90)], "a"), Part(1, [exchange(1, 50, 90)], "a", AHEAD)])
    assert lanes(merged, 1) == [("exchange", 50, 90)]
    assert merged.clock_error_ns == 0


def test_ranks_of_one_other_host_share_the_best_measurement():
    worse = Clock(offset=1900.0, error=500.0)
    parts = [
        Part(0, [], "a"),
        Part(1, [exchange(1, 1010, 1090)], "b", worse),
        Part(2, [exchange(2, 1050, 1090)], "b", AHEAD),
    ]
    merged = merge(parts)
    assert lanes(merged, 1) == [("wait", 10, 50), ("exchange", 50, 90)]
    assert merged.clock_error_ns == 3.0


def test_an_unmeasured_clock_is_noted_and_no_wait_is_split_off():
    merged = merge([Part(0, [exchange(0, 10, 90)], "a"), Part(1, [exchange(1, 50, 90)], "b")])
    assert merged.spans == [exchange(0, 10, 90), exchange(1, 50, 90)]
    assert merged.clock_error_ns is None
    assert "rank 1 ran on another host and no clock was measured" in merged.notes[0]


def test_without_rank_0_the_others_still_agree():
    merged = merge(
        [Part(1, [exchange(1, 1010, 1090)], "b", AHEAD), Part(2, [exchange(2, 2050, 2090)], "c", Clock(2000.0))]
    )
    assert lanes(merged, 1) == [("wait", 10, 50), ("exchange", 50, 90)]
    assert merge([Part(1, [exchange(1, 10, 90)], "a"), Part(2, [exchange(2, 50, 90)], "a")]).clock_error_ns == 0
    assert merge([]).spans == []


def test_metadata_of_several_ranks():
    costs = [{"overhead_ns_per_step": cost, "dropped": 1, "every": 1} for cost in (5.0, 9.0, None)]
    rows = [[(0, 1, 2)], [], [(0, 3, 4)]]
    parts = [
        Part(rank, [], "aab"[rank], Clock(), cores=(2, 4, 8)[rank], cpu_times=rows[rank], recording_cost=costs[rank])
        for rank in range(3)
    ]
    assert merge(parts).metadata == {
        "hosts": {"0": "a", "1": "a", "2": "b"},
        "cores": {"a": 4, "b": 8},
        "usage": {"0": [[0, 1, 2]], "2": [[0, 3, 4]]},
        "recorder": {"overhead_ns_per_step": 9.0, "dropped": 3, "every": 1},
        "clock_error_ns": 0.0,
    }
    assert merge([replace(parts[0], recording_cost=costs[2])]).metadata["recorder"] == {"dropped": 1, "every": 1}
    assert merge([Part(0, [], "a")]).metadata == {"clock_error_ns": 0.0}


@pytest.fixture
def folder(tmp_path):
    for rank in range(3):
        spans = [Span(rank, "forward", "forward", "", step, 10 * step, 10 * step + 5) for step in range(200)]
        write_rank_file(Part(rank, spans, "host", AHEAD), tmp_path, world_size=3)
    return tmp_path


def counts(merged):
    return [sum(span.rank == rank for span in merged.spans) for rank in range(3)]


def test_rank_files_are_read_as_written(folder):
    found = read_rank_file(folder / rank_file_name(2))
    assert (found.part.rank, found.part.host, found.part.clock, found.world_size, found.problem) == (
        2,
        "host",
        AHEAD,
        3,
        "",
    )
    assert found.part.spans[7] == Span(2, "forward", "forward", "", 7, 70, 75)
    merged = merge_folder(folder)
    assert counts(merged) == [200, 200, 200]
    assert merged.notes == ()


def test_a_missing_file_is_noted_and_the_others_are_merged(folder):
    (folder / rank_file_name(1)).unlink()
    merged = merge_folder(folder)
    assert counts(merged) == [200, 0, 200]
    assert merged.notes == ("rank1.spans.jsonl.gz is missing: rank 1 is left out",)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_truncated_file_gives_the_spans_it_holds(folder, share):
    path = folder / rank_file_name(1)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    merged = merge_folder(folder)
    first, cut, last = counts(merged)
    assert (first, last) == (200, 200)
    assert 0 <= cut <= 200
    assert f"rank1.spans.jsonl.gz is cut off: {cut} of 200 spans can be read" in merged.notes


def test_a_damaged_file_is_not_called_truncated(folder):
    path = folder / "rank1.spans.jsonl.gz"
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(4) + data[-4:])
    (note,) = merge_folder(folder).notes
    assert note.startswith("rank1.spans.jsonl.gz is damaged (CRC check failed")


def test_a_file_without_a_head_or_of_another_format_is_left_out(folder):
    (folder / rank_file_name(0)).write_bytes(b"")
    (folder / rank_file_name(1)).write_bytes(gzip.compress(b'{"format": "other"}\n'))
    merged = merge_folder(folder)
    assert counts(merged) == [0, 0, 200]
    assert "rank0.spans.jsonl.gz cannot be read" in merged.notes[0]
    assert "does not say 'syncline spans 1'" in merged.notes[1]


def test_a_broken_line_ends_the_file(folder):
    path = folder / rank_file_name(1)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    lines[10] = b'["forward", "forward", "", 1, "soon", 2, 0]\n'
    path.write_bytes(gzip.compress(b"".join(lines)))
    merged = merge_folder(folder)
    assert counts(merged)[1] == 9
    assert "is broken in line 11 (a value is missing or has the wrong type), after 9 spans" in merged.notes[0]


def test_a_rank_with_two_files_counts_once(folder):
    path = folder / rank_file_name(7)
    path.write_bytes((folder / rank_file_name(1)).read_bytes())
    merged = merge_folder(folder)
    assert counts(merged) == [200, 200, 200]
    assert "holds rank 1 again" in merged.notes[0]


def test_a_folder_without_readable_files_is_an_error(tmp_path):
    (tmp_path / rank_file_name(0)).write_bytes(b"no gzip")
    with pytest.raises(UsageError, match="no rank file that can be read"):
        merge_folder(tmp_path)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=5), inner))
HEAD = st.fixed_dictionaries(
    {"format": st.just("syncline spans 1"), "rank": VALUES | st.just(0), "world_size": VALUES | st.just(2)}
    | {"host": VALUES | st.just(""), "spans": VALUES | st.just(1)},
    optional={"clock": JSON | st.dictionaries(st.sampled_from(["offset", "drift", "error", "at"]), VALUES)},
)


@settings(max_examples=60)
@given(st.one_of(HEAD, JSON), st.lists(JSON, max_size=3), st.binary(max_size=20))
def test_no_content_makes_it_crash(tmp_path_factory, head, rows, rest):
    folder = tmp_path_factory.mktemp("parts")
    write_rank_file(Part(1, [], "h"), folder, world_size=2)
    text = "\n".join(json.dumps(value) for value in [head, *rows])
    (folder / rank_file_name(0)).write_bytes(gzip.compress(text.encode() + b"\n" + rest))
    assert merge_folder(folder).spans == []
