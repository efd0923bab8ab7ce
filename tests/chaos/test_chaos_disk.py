"""Disks that are full, and folders that are read-only: named errors, nothing lost, and runs that can go on."""

import time

import pytest
from trained import (
    EVERY,
    GRACE_S,
    SLOW,
    TIMEOUT_S,
    TOTAL,
    Job,
    check_clean,
    difference,
    final_state,
    results,
    resume,
    rows,
    wait_for_rows,
)

pytestmark = pytest.mark.namespaces
FULL = "No space left on device"
READ_ONLY = "Read-only file system"
LARGE = Job("syncline(powersgd(rank=2))", 2, "resumable:net(hidden=200)")
"""Checkpoints of about 10 MB, which is much more than everything else that it writes."""


def mount(box, options: str) -> None:
    """A file system of its own at `disk`."""
    (box.folder / "disk").mkdir()
    box.shell(f"mount -t tmpfs -o {options} tmpfs disk")


def fill(box, *, leave_kb: int) -> None:
    """Fill the disk up to a few kilobytes, and prove it."""
    box.shell(
        f"rm -f disk/filler; head -c $(($(df -k --output=avail disk | tail -1) - {leave_kb}))k /dev/zero > disk/filler"
    )
    assert int(box.shell("df -k --output=avail disk | tail -1")) <= leave_kb


@pytest.mark.chaos
def test_a_disk_that_is_full_for_a_checkpoint_is_named_and_the_results_are_kept(box, record):
    mount(box, "size=15m")
    began = time.monotonic()
    running = box.syncline(*LARGE.arguments("disk/run")).finish()
    assert running.code == 1, running.err
    check_clean(box, running)
    (crash,) = results(box, "disk/run")["runs"]
    assert FULL in crash["error"]["summary"]
    assert "step-00000010.tmp/rank" in crash["error"]["summary"], "the file is named"
    assert len(crash["loss"]) == 2 * EVERY
    kept = [path.name for path in box.path(box.folder / "disk/run/checkpoints").iterdir()]
    assert kept == [f"step-{EVERY:08d}"], "the one before is whole, the other's space is free"
    record("disk full", what="checkpoint", outcome="file named, row saved", seconds=running.ended_at - began)


@pytest.mark.chaos
def test_a_read_only_folder_is_named_at_once(box, record):
    mount(box, "size=4m")
    box.shell("mount -o remount,ro disk")
    began = time.monotonic()
    running = box.syncline(*LARGE.arguments("disk/run")).finish()
    assert running.code == 2
    assert f"disk/run: {READ_ONLY}" in running.err
    check_clean(box, running)
    record("read-only folder", what="--out", outcome="folder named, exit code 2", seconds=running.ended_at - began)


@pytest.mark.chaos
@pytest.mark.parametrize("leave_kb", [0, 4, 40, 400])
def test_a_disk_that_fills_up_during_the_run(box, record, draw, undisturbed, leave_kb):
    """By another program: with no room the next row of a log fails, with a little room the next checkpoint."""
    mount(box, "size=40m")
    after = draw.randrange(EVERY + 1, TOTAL - EVERY)
    running = box.syncline(*LARGE.arguments("disk/run"), **SLOW)
    wait_for_rows(box, running, "disk/run", after)
    fill(box, leave_kb=leave_kb)
    fired = time.monotonic()
    running.finish(TIMEOUT_S + 60)
    assert running.code in (1, 2), running.err
    assert FULL in running.err + running.out
    assert "disk/run/" in running.err + running.out, "the file is named"
    check_clean(box, running)
    assert rows(box, "disk/run") < TOTAL
    box.shell("rm disk/filler")
    resume(box, "disk/run")
    assert difference(final_state(box, "disk/run"), undisturbed(LARGE)) == ""
    what = f"{leave_kb} kB are left after {after} steps"
    outcome = f"file named, exit code {running.code}, resumed bit-equal"
    record("disk full", what=what, outcome=outcome, seconds=running.ended_at - fired)


@pytest.mark.chaos
@pytest.mark.parametrize("kb", [4, 24, 72, 150])
def test_a_disk_that_is_too_small_for_results_report_or_trace(box, record, kb):
    mount(box, f"size={kb}k")
    began = time.monotonic()
    job = Job("all-reduce", 2)
    arguments = job.arguments("disk/run")
    place = arguments.index("--checkpoint-every")
    running = box.syncline(*arguments[:place], *arguments[place + 2 :]).finish(150)
    check_clean(box, running)
    assert FULL in running.err + running.out
    assert "disk/run" in running.err + running.out, "the file is named"
    names = [path.name for path in box.path(box.folder / "disk").rglob("*")]
    assert not [name for name in names if name.endswith(".part") or name.startswith(".")], "half a file is left"
    outcome = f"file named, exit code {running.code}"
    if running.code == 0:
        (row,) = results(box, "disk/run")["runs"]
        assert len(row["loss"]) == TOTAL, "the results are worth more than the trace"
        outcome = "results kept without the trace"
    record("disk full", what=f"a disk of {kb} kB", outcome=outcome, seconds=running.ended_at - began)


@pytest.mark.chaos
def test_folders_that_become_read_only(box, record, draw, undisturbed):
    """The checkpoints' folder first, while the run goes on; then the whole run, before it is resumed."""
    mount(box, "size=40m")
    after = draw.randrange(EVERY + 1, TOTAL - EVERY)
    running = box.syncline(*LARGE.arguments("disk/run"), **SLOW)
    wait_for_rows(box, running, "disk/run", after)
    box.shell("mount -t tmpfs -o ro tmpfs disk/run/checkpoints")
    fired = time.monotonic()
    running.finish(TIMEOUT_S + 60)
    assert running.code == 1, running.err
    check_clean(box, running)
    (crash,) = results(box, "disk/run")["runs"]
    assert READ_ONLY in crash["error"]["summary"]
    assert "disk/run/checkpoints/step-" in crash["error"]["summary"]
    box.shell("umount disk/run/checkpoints; mount -o remount,ro disk")
    refused = box.syncline("train", "--resume", "disk/run", "--trust").finish()
    assert refused.code == 2
    assert f"disk/run/config.json': {READ_ONLY}" in refused.err
    check_clean(box, refused)
    box.shell("mount -o remount,rw disk")
    resume(box, "disk/run")
    assert difference(final_state(box, "disk/run"), undisturbed(LARGE)) == ""
    assert running.ended_at - fired < TIMEOUT_S + GRACE_S
    what = f"checkpoints, after {after} steps; then the whole run"
    outcome = "file named both times, resumed bit-equal"
    record("read-only folder", what=what, outcome=outcome, seconds=running.ended_at - fired)
