"""A soak: memory, threads and open files stay flat while engines come and go."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.namespaces, pytest.mark.chaos]
RANKS = 4
FLAT_MB = 16.0
"""Growth of a rank's memory that is allowed: what the allocator keeps varies by a few megabytes."""
WARM_UP = 0.25
"""Share of the samples at the start that is left out: the allocator's pools fill up for about 60 engines."""


@pytest.mark.timeout(0)
def test_memory_and_threads_are_flat(box, record, request):
    seconds = float(request.config.getoption("--soak"))
    program = Path(__file__).with_name("soak_ranks.py")
    done = box.start(sys.executable, program, RANKS, seconds).finish(seconds + 240)
    assert done.code == 0, done.err
    assert box.left_behind() == {}
    ranks = json.loads(done.out)
    assert all(len(samples) >= 8 for samples in ranks), "too short to say anything: use a longer --soak"
    steady = [samples[int(WARM_UP * len(samples)) :] for samples in ranks]
    growth = [samples[-1]["rss_mb"] - samples[0]["rss_mb"] for samples in steady]
    assert max(growth) < FLAT_MB, (growth, ranks[0])
    for key in ("threads", "files"):
        assert all(samples[-1][key] <= samples[0][key] for samples in steady), (key, steady)
    first, last = steady[0][0], steady[0][-1]
    record(
        "soak", what=f"{RANKS} ranks, {last['steps']} steps, {last['steps'] // 60} engines", seconds=last["s"],
        outcome=f"memory {first['rss_mb']} -> {last['rss_mb']} MB, threads {first['threads']} -> {last['threads']},"
        f" open files {first['files']} -> {last['files']}",
        growth_mb=[round(value, 1) for value in growth],
    )  # fmt: skip
