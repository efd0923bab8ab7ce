"""Trace files and rank files that an earlier version wrote are read with the same figures as then."""

import pytest
from trace_files import FIXTURES

from syncline.trace import analyze, load, partition
from syncline.trace.merge.rank_file import merge_folder

FOLDER = FIXTURES / "syncline-0.1"
# Nanoseconds of step 2, as that version computed them.
STEP_2 = {
    0: {"data": 249_209, "forward": 431_379, "backward": 1_095_423, "exposed_encode": 0, "exposed_exchange": 14_489_077}
    | {"wait": 14_377_312, "update": 507_562, "other": 34_271},
    1: {"data": 13_559_600, "forward": 621_621, "backward": 817_550, "exposed_encode": 0}
    | {"exposed_exchange": 15_920_779, "wait": 0, "update": 308_878, "other": 25_017},
}


@pytest.mark.parametrize("read", [load, merge_folder])
def test_phases_are_as_the_earlier_version_computed_them(read):
    spans = read(FOLDER).spans
    for rank, phases in STEP_2.items():
        steps = partition(span for span in spans if span.rank == rank)
        assert list(steps) == [0, 1, 2, 3]
        assert steps[2] == phases | {"between": 0}, "it had no such phase"


def test_metadata_of_an_earlier_trace_is_kept():
    source = load(FOLDER)
    assert source.notes == ()
    assert source.metadata["strategy"] == "ddp"
    assert source.metadata["usage"]["1"][2] == [2, 3_318_537, 3_155_375]
    assert source.metadata["recorder"]["overhead_ns_per_step"] == 801_450.8


@pytest.mark.parametrize("trace", [FOLDER, str(FOLDER / "trace.json.gz"), load(FOLDER)])
def test_analyze_takes_a_folder_a_file_or_a_loaded_trace(trace):
    analysis = analyze(trace)
    assert (analysis.verdict.kind, analysis.late[0].rank, analysis.strategy) == ("straggler", 1, "ddp")
