"""Signals at random moments to ranks and commands: a named error, nothing left, and a resume that is bit-equal."""

import os
import signal
import time
from contextlib import suppress

import pytest
from sandbox import send
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
    rank_processes,
    results,
    resume,
    wait_for_rows,
)

pytestmark = [pytest.mark.namespaces, pytest.mark.chaos]
JOBS = (Job("syncline", 3), Job("syncline(powersgd(rank=2))", 3), Job("ddp", 3))
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


def disturb(box, draw, record, undisturbed, *, target: str) -> None:
    """Start a job, send a signal to `target` at a random moment, check the end, resume, compare."""
    job, number = draw.choice(JOBS), draw.choice(SIGNALS)
    after, delay = draw.randrange(1, TOTAL - 3), draw.uniform(0, 0.15)
    running = box.syncline(*job.arguments("run"), **SLOW)
    wait_for_rows(box, running, "run", after)
    time.sleep(delay)  # any moment of a step, not only its end
    ranks = rank_processes(box, running.pid)
    victim = draw.randrange(job.ranks)
    pid = ranks[victim] if target == "rank" else running.pid
    fired = time.monotonic()
    if number == signal.SIGTERM and target == "command":
        os.kill(pid, number)
    else:
        send(pid, number)
    if number == signal.SIGSTOP and target == "command":
        time.sleep(2 * TIMEOUT_S)  # longer than ranks wait for each other
        running.go_on()
    running.finish(TIMEOUT_S + 60)
    check_clean(box, running)
    outcome = check_end(box, running, target, number, victim)
    took = running.ended_at - fired
    assert took < GRACE_S + (3 if number == signal.SIGSTOP else 0) * TIMEOUT_S
    if running.code:
        checkpoints = list((box.folder / "run/checkpoints").glob("step-*[0-9]"))
        if checkpoints:
            resume(box, "run")
        else:
            assert after <= EVERY + 2, "a checkpoint is lost"
            outcome += "; no checkpoint yet"
    if not outcome.endswith("yet"):
        assert difference(final_state(box, "run"), undisturbed(job)) == ""
        outcome += ", resumed bit-equal" if running.code else ", bit-equal"
    who = f"rank {victim}" if target == "rank" else "the command"
    what = f"{who} of {job.strategy}, {job.ranks} ranks, after {after} steps"
    record(number.name, what=what, outcome=outcome, seconds=took, timeout_s=TIMEOUT_S)


def check_end(box, running, target: str, number: signal.Signals, victim: int) -> str:
    """The command ended as it must after this signal; returns that in words."""
    if target == "command":
        expected = {signal.SIGKILL: 137, signal.SIGTERM: 143, signal.SIGSTOP: 0}[number]
        assert running.code in (expected, -number), running.err
        return f"exit code {expected}" if expected else "went on after SIGCONT"
    assert running.code == 1, running.err
    (crash,) = results(box, "run")["runs"]
    summary = crash["error"]["summary"]
    if number == signal.SIGSTOP:
        named = f"rank {victim}" in summary or "Timed out" in summary or "timed out" in summary
        assert named, summary
        return summary.split(":")[0]
    assert crash["error"]["rank"] == victim, crash["error"]
    assert number.name in summary, summary
    return f"rank {victim} named"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(6))
def test_a_signal_to_a_rank(box, draw, record, undisturbed, turn):
    disturb(box, draw, record, undisturbed, target="rank")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(4))
def test_a_signal_to_the_command(box, draw, record, undisturbed, turn):
    disturb(box, draw, record, undisturbed, target="command")


@pytest.mark.timeout(600)
def test_everything_is_killed_again_and_again(box, draw, record, undisturbed):
    """Three kills in one run, each after a resume."""
    job = Job("syncline(powersgd(rank=2))", 3)
    began, points = time.monotonic(), sorted(draw.sample(range(EVERY + 2, TOTAL - 2), 3))
    arguments = job.arguments("run")
    for after in points:
        running = box.syncline(*arguments, **SLOW)
        wait_for_rows(box, running, "run", after)
        assert box.processes()
        for pid in box.processes():
            with suppress(ProcessLookupError):  # it has ended because another one was killed
                send(pid, signal.SIGKILL)
        running.finish()
        # The kill of everything leaves the temporary folders that only the killed could have removed.
        assert box.processes() == {}
        box.shell("rm -rf /mnt/*")
        arguments = ["train", "--resume", "run", "--trust"]
    resume(box, "run")
    assert difference(final_state(box, "run"), undisturbed(job)) == ""
    what = f"all processes of {job.strategy}, after {', '.join(map(str, points))} steps"
    record("SIGKILL", what=what, outcome="resumed three times, bit-equal", seconds=time.monotonic() - began)
