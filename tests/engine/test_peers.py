"""Every surviving rank names a lost or stuck peer."""

import re
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from peer_helpers import PERIOD, process_letter, ranks

from syncline.engine.health.heartbeat import Heartbeat, Observation, RankProcess, diagnose, process_state, this_process
from syncline.engine.health.peers import Peers
from syncline.errors import PeerError

WAITS = "step 12: waiting for unit 'fc1'"


def _threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline")]


def _all_doing(made, text=WAITS):
    for rank in made:
        rank.tell("doing", text)
    for rank in made:
        rank.hear()


@pytest.mark.parametrize(("fault", "tcp"), [("kill", False), ("stop", True)])
def test_a_lost_rank_on_the_same_machine_is_named_at_once(fault, tcp):
    with ranks(3, tcp=tcp) as made:
        _all_doing(made)
        getattr(made[2], fault)()
        for rank in made[:2]:
            rank.tell("explain")
        for rank in made[:2]:
            text, lost, took = rank.hear()
            assert lost == (2,)
            state = {"kill": "is dead", "stop": r"is stopped \(SIGSTOP or a debugger\)"}[fault]
            assert re.match(
                rf"unit 'fc1' of step 12: rank 2 \(host \S+, pid {made[2].process.pid}\) {state}: "
                rf"last heartbeat \d+\.\d s ago, doing: {WAITS}",
                text,
            ), text
            assert took < 2 * PERIOD + 1.0 + 0.5


def test_a_lost_rank_on_another_machine_is_named_because_it_is_silent():
    with ranks(3, tcp=True, apart=True, global_ranks=[4, 5, 7], holder=4) as made:
        _all_doing(made)
        made[2].stop()
        text, lost, took = made[0].ask("explain", None, 0.5)
        assert lost == (7,)
        assert re.search(r"rank 7 \(.*\) is stopped or dead: no heartbeat in the 0\.\d s that this rank watched", text)
        assert text.endswith(f"doing: {WAITS}")
        assert 1.5 * PERIOD < took < 2 * PERIOD + 0.5 + 0.5
        assert made[1].ask("explain")[:2] == (f"{text} (found by rank 4)", (7,))


def test_every_survivor_of_a_real_exchange_names_the_killed_rank():
    with ranks(3, gloo=True) as made:
        _all_doing(made)
        for rank in made[:2]:
            rank.tell("all_reduce")
        time.sleep(0.3)
        made[2].kill()
        for text, lost, _ in [made[0].hear(), made[1].hear()]:
            assert lost == (2,)
            # On a busy machine the store may not answer in time: then only the process shows that it is gone.
            assert "is dead" in text or "is gone: it died or ended" in text


def test_a_rank_stuck_in_user_code_is_alive_but_has_not_joined():
    with ranks(3) as made:
        _all_doing(made)
        made[2].ask("doing", "step 11: forward")
        assert made[2].ask("sleep", 60) == "sleeping"
        text, lost, _ = made[0].ask("explain", RuntimeError("Timed out waiting 5000ms for recv"))
        assert process_letter(made[2].process.pid) in "SR"
        assert not made[2].pipe.poll(0)
        assert lost == (2,)
        assert text.endswith("is alive but has not joined: it is at 'step 11: forward' (stuck in user code?)")


def test_a_failed_exchange_of_living_ranks_passes_the_cause_on():
    with ranks(2) as made:
        _all_doing(made)
        text, lost, _ = made[0].ask("explain", OSError("no route to host\nand more"))
        assert lost == ()
        assert (
            f"the exchange failed though all ranks are alive (rank 1 at '{WAITS}'): OSError: no route to host" in text
        )


def test_a_rank_that_ends_with_an_error_says_why_and_others_fail_at_once():
    with ranks(3) as made:
        _all_doing(made)
        made[2].ask("leave", ValueError("bad batch"))
        heard = made[1].ask("alarm_text", 5)
        assert re.match(
            r"rank 2 raised the alarm: rank 2 \(.*\) ended with ValueError: bad batch, doing: step 12", heard
        )
        made[2].kill()
        text, lost, took = made[0].ask("explain")
        assert lost == (2,)
        assert "ended with ValueError: bad batch" in text
        assert "dead" not in text
        assert took < 1


def test_a_rank_that_closes_is_not_dead_and_raises_no_alarm():
    with ranks(2) as made:
        _all_doing(made)
        made[1].ask("close")
        made[1].kill()
        assert made[0].ask("alarm_text", 0.5) is None
        text, lost, _ = made[0].ask("explain")
        assert lost == (1,)
        assert text.endswith(f"ended on purpose, doing: {WAITS}")


def test_a_rank_that_left_because_of_another_is_not_blamed():
    with ranks(3) as made:
        _all_doing(made)
        made[2].ask("doing", "step 11: forward")
        made[1].ask("leave", PeerError("rank 2 did not come", ranks=[2]))
        made[1].kill()
        text, lost, _ = made[0].ask("explain")
        assert lost == (2,)
        assert "has not joined" in text


@pytest.mark.parametrize(("fault", "apart"), [("kill", False), ("stop", False), ("kill", True)])
def test_the_rank_that_holds_the_store_is_named_when_the_store_is_gone(fault, apart):
    with ranks(3, tcp=True, apart=apart, timeout=0.6) as made:
        getattr(made[0], fault)()
        for rank in made[1:]:
            rank.tell("explain", None, 0.5)
        for rank in made[1:]:
            text, lost, took = rank.hear()
            assert lost == (0,)
            assert re.search(r"rank 0 \(host \S+, pid \d+; it holds the store\) is (likely lost|gone|stopped)", text), (
                text
            )
            assert ("likely lost" in text) == apart
            assert took < 2 * PERIOD + 1.0 + 0.5
        heard = made[1].ask("alarm_text", 5)
        assert re.match(r"the store does not answer \(.*\): rank 0 \(it holds the store\) is likely lost", heard)
        assert made[2].ask("close") < 3


def test_an_alarm_reaches_a_rank_that_was_not_waiting():
    with ranks(3) as made:
        _all_doing(made[:2])
        made[1].ask("doing", "step 12: backward")
        made[2].kill()
        made[1].tell("alarm_text", 10)
        first, _, _ = made[0].ask("explain")
        heard = made[1].hear()
        assert heard == "rank 0 raised the alarm: " + first.removeprefix("unit 'fc1' of step 12: ")
        text, lost, took = made[1].ask("explain")
        assert text == f"{first} (found by rank 0)"
        assert lost == (2,)
        assert took < 0.5


def test_two_groups_in_one_process_are_separate_and_leave_no_thread():
    store = dist.HashStore()
    a, b = (Peers(store, rank=0, world=1, timeout=1, period=0.05, prefix=prefix) for prefix in "ab")
    a.start()
    b.start()
    assert len(_threads()) == 2
    a.raise_alarm("trouble")
    time.sleep(0.2)
    assert a.alarm_text() == "rank 0 raised the alarm: trouble"
    assert b.alarm_text() is None
    for peers in (a, b, a):
        peers.close()
    assert _threads() == []
    assert "has closed its engine: OSError: late" in str(b.explain("unit", OSError("late")))
    again = Peers(store, rank=0, world=1, timeout=1, prefix="a")  # the alarm of the first one is history
    again.start()
    time.sleep(0.1)
    assert again.alarm_text() is None
    again.close()
    assert _threads() == []


def test_a_rank_without_heartbeats_is_silent_and_one_that_left_is_not():
    store = dist.HashStore()
    watching, other = (Peers(store, rank=rank, world=2, timeout=0.3, global_ranks=[4, 7]) for rank in range(2))

    def silent(seconds):
        until = time.monotonic() + seconds
        while not (found := watching.silent()) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    assert silent(5) == [7], "it never sent one"
    other.start()
    time.sleep(0.1)
    watching._looked_at = -1.0
    assert silent(0.8) == []
    other._stop.set()  # as if its host had vanished
    assert silent(5) == [7]
    other.leave()
    watching._looked_at = -1.0
    assert silent(0.8) == []
    other.close()
    watching.close()


def test_a_slow_store_in_a_file_is_not_a_lost_one(tmp_path):
    """Many ranks on few cores: an answer may take seconds, and then no rank that has just ended is to blame."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    peers, other = (Peers(store, rank=rank, world=2, timeout=5.0, period=0.05) for rank in range(2))
    for each in (peers, other):
        each.doing = WAITS
        each.start()
    time.sleep(0.2)
    other.leave(ValueError("bad batch"))
    read, calls = peers._read_all, []

    def slow():
        calls.append(time.sleep(1.5))
        return read()

    peers._read_all, peers._alarm = slow, None
    error = peers.explain("unit 'fc1'")
    assert calls, "the store was slow"
    assert error.ranks == (1,)
    assert "ended with ValueError: bad batch" in str(error)
    other.close()
    peers.close()


def test_on_an_overloaded_machine_a_rank_watches_longer_before_it_blames_most_others():
    store = dist.HashStore()
    peers, *others = (Peers(store, rank=rank, world=4, timeout=5.0, period=0.05) for rank in range(4))
    for each in (peers, *others):
        each.doing = WAITS
        each._store.set(f"who/{each._rank}", each._own.encode())
        each._beat()
    late_beats = threading.Timer(1.0, lambda: [each._beat() for each in others[:2]])
    late_beats.start()
    error = peers.explain("unit 'fc1'", grace=0.1)
    late_beats.join()
    assert error.ranks == (3,), error


def test_heartbeats_continue_while_another_user_of_the_connection_blocks():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    peers = Peers(store, rank=0, world=1, timeout=1, period=0.02)
    peers.start()
    reader = threading.Thread(target=store.get, args=("missing",))
    reader.start()
    time.sleep(0.1)
    before = peers._count
    time.sleep(0.3)
    assert reader.is_alive()
    assert peers._count > before + 3
    dist.TCPStore("127.0.0.1", store.port, 1, False).set("missing", "x")
    reader.join()
    peers.close()


def test_a_failing_process_reports_its_error_at_exit(monkeypatch):
    store = dist.HashStore()
    survivor, failing = (Peers(store, rank=rank, world=2, timeout=0.4) for rank in range(2))
    failing.doing = "step 3: forward"
    failing.start()
    monkeypatch.setattr(sys, "last_value", KeyError("label"), raising=False)  # as the interpreter does at its end
    failing._at_exit()
    error = survivor.explain("unit 'fc1'")
    assert error.ranks == (1,)
    assert "ended with KeyError: 'label', doing: step 3: forward" in str(error)
    survivor.close()


HERE = this_process()


def _seen(doing, *, advanced=True, process=None, doing_before=None, **fields):
    first = Heartbeat(1, doing_before or doing, 0.0)
    return Observation(first, Heartbeat(2 if advanced else 1, doing, 0.0, **fields), None, process)


@pytest.mark.parametrize(
    ("seen", "kind", "lost", "part"),
    [
        ({1: _seen(WAITS), 2: Observation(None, None)}, "lost", (2,), "never joined"),
        ({1: _seen(WAITS), 2: _seen("step 12: forward")}, "behind", (2,), "stuck in user code"),
        ({1: _seen("step 9: a", doing_before="step 8: b")}, "behind", (1,), "makes progress (slow?)"),
        ({1: _seen("step 9: a", doing_before="step 8: b"), 2: _seen("step 9: c")}, "behind", (2,), "stuck"),
        ({1: _seen("step 11: a"), 2: _seen(WAITS, advanced=False)}, "lost", (2,), "is stopped or dead"),
        ({1: _seen(WAITS, advanced=False, process="running")}, "behind", (1,), "holds the GIL"),
        (
            {1: _seen("step 13: forward"), 2: _seen("step 12: waiting for 'fc2'")},
            "unknown",
            (),
            "all ranks are alive",
        ),
        ({1: _seen("step 11: forward", failed=True)}, "unknown", (), "all ranks are alive"),
        ({1: _seen(WAITS, failed=True, end="PeerError: x")}, "lost", (1,), "ended with PeerError"),
        ({1: _seen(WAITS, advanced=False), 2: _seen(WAITS, end="")}, "lost", (1, 2), "; rank 2 ended on purpose"),
    ],
)
def test_the_diagnosis(seen, kind, lost, part):
    found = diagnose(WAITS, seen, global_rank=lambda rank: rank, own=HERE, now=1.0, watched=2.0)
    assert (found.kind, found.ranks) == (kind, lost)
    assert part in found.text


def test_the_state_of_a_process_of_this_machine():
    assert process_state(HERE, HERE) == "running"
    assert (
        process_state(RankProcess(HERE.host, HERE.pid, HERE.started + 1, HERE.machine), HERE) == "gone"
    )  # the pid came again
    assert process_state(RankProcess("far", HERE.pid, HERE.started, "another"), HERE) is None
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert process_state(RankProcess(HERE.host, ended.pid, 0, HERE.machine), HERE) == "gone"
