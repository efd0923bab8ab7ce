"""Hosts that vanish: the link is cut, no packet passes, and no TCP connection is reset."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engine_ranks import HOLDS_GIL
from links import WAYS
from sandbox import send
from trained import (
    GRACE_S,
    SLOW,
    TIMEOUT_S,
    Job,
    check_clean,
    cut_link,
    difference,
    final_state,
    rank_processes,
    results,
    resume,
    wait_for_rows,
)

pytestmark = pytest.mark.namespaces
CODECS = (None, "powersgd(rank=2)", "topk(0.1)", "bf16")


def lose(box: Any, **case: Any) -> dict[str, Any]:
    """Run `engine_ranks.py`; the fault must have happened."""
    done = box.start(sys.executable, Path(__file__).with_name("engine_ranks.py"), json.dumps(case)).finish()
    assert done.code == 0, done.err
    assert box.left_behind() == {}
    said: dict[str, Any] = json.loads(done.out)
    assert said["fired"] is not None, f"the fault did not happen: {said}"
    return said


def check_survivors(said: dict[str, Any], *, ranks: int, victim: int, timeout: float, grace: float) -> float:
    """Every other rank named the victim in time and ended cleanly; returns the seconds that the slowest took."""
    took = []
    for rank in set(range(ranks)) - {victim}:
        ended = said["ranks"][str(rank)]
        assert (ended["error"], ended["ranks"]) == ("PeerError", [victim]), f"rank {rank}: {ended['text']}"
        assert ended["threads"] == []
        assert said["ends"][str(rank)][1] == 0
        took.append(ended["at"] - said["fired"])
    assert max(took) < timeout + grace
    return max(took)


def check_vanished(said: dict[str, Any], *, victim: int, timeout: float, grace: float) -> None:
    """The vanished rank lives on its cut-off host, and ends with an error of its own that names others."""
    ended = said["ranks"][str(victim)]
    assert ended["error"] == "PeerError"
    assert victim not in ended["ranks"]
    assert ended["at"] - said["fired"] < timeout + grace
    assert said["ends"][str(victim)][1] == 0


def test_a_vanished_host_is_named_by_all_others_and_ends_itself(box, record):
    said = lose(box, ranks=2, nodes=True, victim=1, fault="port unplugged", step=5, timeout=2.0)
    took = check_survivors(said, ranks=2, victim=1, timeout=2.0, grace=GRACE_S)
    check_vanished(said, victim=1, timeout=2.0, grace=GRACE_S)
    record("vanished host", what="2 nodes, attach", outcome="PeerError names rank 1", seconds=took, timeout_s=2.0)


@pytest.mark.chaos
@pytest.mark.parametrize("holder", [False, True], ids=["another rank", "rank 0, which serves the store"])
@pytest.mark.parametrize("way", WAYS)
def test_vanished_hosts(box, record, draw, way, holder):
    ranks, codec, step = draw.randint(3, 5), draw.choice(CODECS), draw.randrange(100)
    victim = 0 if holder else draw.randrange(1, ranks)
    said = lose(box, ranks=ranks, nodes=True, victim=victim, fault=way, step=step, timeout=4.0, codec=codec)
    took = check_survivors(said, ranks=ranks, victim=victim, timeout=4.0, grace=GRACE_S)
    check_vanished(said, victim=victim, timeout=4.0, grace=GRACE_S)
    what = f"{ranks} nodes, attach, {codec or 'dense'}, step {step}, {way} at rank {victim}"
    record("vanished host", what=what, outcome=f"PeerError names rank {victim}", seconds=took, timeout_s=4.0)


@pytest.mark.chaos
@pytest.mark.parametrize("launcher", ["train --nodes", "cluster -- train"])
def test_a_run_whose_node_vanishes_is_saved_and_resumes_bit_equal(box, record, draw, undisturbed, launcher):
    job, way = Job("syncline(powersgd(rank=2))", 3), draw.choice(WAYS)
    if launcher == "train --nodes":
        running = box.syncline(*job.arguments("run", "--nodes", 3), **SLOW)
    else:
        # The launcher decides how many ranks there are.
        train = [sys.executable, "-m", "syncline", *job.arguments("run", "--seed", 0)]
        running = box.syncline("cluster", "--nodes", 3, "--", *train, **SLOW)
    victim, after = draw.randrange(3), draw.randrange(6, 15)
    wait_for_rows(box, running, "run", after)
    fired = cut_link(box, way, victim=rank_processes(box, running.pid)[victim], owner=running.pid)
    running.finish(TIMEOUT_S * 2 + 40)
    assert running.code == 1, running.err
    check_clean(box, running)
    (crash,) = results(box, "run")["runs"]
    assert crash["error"]["summary"].startswith("PeerError: "), crash["error"]["summary"]
    # Two timeouts: of the ranks' exchange, then of the sessions' heartbeats.
    assert running.ended_at - fired < 2 * TIMEOUT_S + GRACE_S
    resume(box, "run", "--nproc", 3)
    assert difference(final_state(box, "run"), undisturbed(job)) == ""
    what = f"{launcher}, 3 nodes, after {after} steps, {way} at rank {victim}"
    record(
        "vanished host", what=what, outcome="PeerError, exit code 1, resumed bit-equal",
        seconds=running.ended_at - fired, timeout_s=TIMEOUT_S,
    )  # fmt: skip


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [16, 32])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "SIGTERM", HOLDS_GIL])
def test_many_ranks_on_one_machine(box, record, draw, ranks, fault):
    victim, step, codec = draw.randrange(1, ranks), draw.randrange(3, 10), draw.choice(CODECS)
    said = lose(box, ranks=ranks, nodes=False, victim=victim, fault=fault, step=step, timeout=8.0, codec=codec)
    took = check_survivors(said, ranks=ranks, victim=victim, timeout=8.0, grace=2 * GRACE_S)
    what = f"{ranks} ranks on this machine, attach, {codec or 'dense'}, step {step}, rank {victim}"
    record(fault, what=what, outcome=f"PeerError names rank {victim} on {ranks - 1} ranks", seconds=took, timeout_s=8.0)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_32_ranks_of_the_command_line_are_killed_and_resumed(box, record, draw, undisturbed):
    job, victim, after = Job("syncline(bf16)", 32), draw.randrange(32), draw.randrange(6, 15)
    running = box.syncline(*job.arguments("run"))
    wait_for_rows(box, running, "run", after)
    ranks = rank_processes(box, running.pid)
    assert len(ranks) == 32
    fired = time.monotonic()
    send(ranks[victim], signal.SIGKILL)
    running.finish(100)
    assert running.code == 1
    check_clean(box, running)
    (crash,) = results(box, "run")["runs"]
    assert (crash["error"]["rank"], "SIGKILL" in crash["error"]["summary"]) == (victim, True)
    resume(box, "run")
    assert difference(final_state(box, "run"), undisturbed(job)) == ""
    what = f"train --nproc 32, after {after} steps, rank {victim}"
    outcome = f"rank {victim} named, resumed bit-equal"
    record("SIGKILL", what=what, outcome=outcome, seconds=running.ended_at - fired)
