"""Too little memory (a control group with a limit): refused before the start, or named when the kernel kills."""

import sys
import time
from contextlib import ExitStack

import pytest
from memory_limit import memory_limit
from sandbox import until
from trained import check_clean, results

pytestmark = [pytest.mark.chaos, pytest.mark.namespaces]
LIMIT = 10**9
TOO_MUCH = ("train", "--model", "vgg11(width=0.5)", "--nproc", 2, "--batch", 2048, "--steps", 3, "--out", "run")
"""Two ranks that keep about 1.5 GB each for their backward passes."""


@pytest.fixture
def limited(box):
    """A control group of `LIMIT` bytes, and the command line in it."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_limit(LIMIT))
        except OSError as error:
            pytest.skip(f"no control group with a memory limit can be made here: {error}")
        yield group, lambda *args: box.start(*group.wrap(sys.executable, "-m", "syncline", *args))
        box.close()


def test_a_session_that_does_not_fit_its_control_group_is_refused(box, limited):
    group, syncline = limited
    done = syncline(*TOO_MUCH).finish()
    assert done.code == 2
    assert "with a batch of 2048 needs about" in done.err
    assert "MB are free: use --batch" in done.err
    assert group.kills() == 0
    check_clean(box, done)


def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_named_with_the_fix(box, limited, record):
    group, syncline = limited
    running = syncline(*TOO_MUCH, "--set", "cluster.memory=64GB")
    assert until(group.kills, seconds=90), "the fault did not happen"
    fired = time.monotonic()
    running.finish()
    assert running.code == 1, running.err
    check_clean(box, running)
    (crash,) = results(box, "run")["runs"]
    rank, said = crash["error"]["rank"], crash["error"]["summary"]
    assert said == "ended by SIGKILL, out of memory: use a smaller batch, fewer ranks or a smaller model"
    assert said in " ".join((running.out + running.err).split())
    outcome = f"rank {rank} and the fix named, exit code 1"
    record("out of memory", what="train --nproc 2 in 1 GB", outcome=outcome, seconds=running.ended_at - fired)
