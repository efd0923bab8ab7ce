"""Timelines worked out by hand, and the spans that show them."""

from typing import Any

import pytest

from syncline.errors import UsageError
from syncline.sim import Job, Layer, Outcome, Scenario, Transfer, Wait, simulate
from syncline.trace import partition

# Forward 1 each, backward 2 each: ready at 2 (third), 4 (second), 6 (first). The last layer has most of the bytes.
LAYERS = tuple(Layer(name, 1.0, 2.0, (i,)) for i, name in enumerate(("first", "second", "third")))


def wired(unit: int, wire: float, **more: Any) -> Job:
    return Job(unit, unit, 0.0, (Transfer(0.0, wire),), **more)


def run(*jobs: Job, **more: Any) -> Outcome:
    return simulate(Scenario(LAYERS, jobs, more.pop("update", (0.0,) * 3), **more))


def test_first_in_first_out() -> None:
    """Wire: third 2-8, second 8-9, first 9-10; forward from 10 on, instead of 6."""
    told = run(wired(2, 6), wired(1, 1), wired(0, 1))
    assert (told.step, told.compute, told.wire, told.bound, told.exposed) == (13, 9, 8, 9, 4)
    assert told.waits == (Wait(layer=0, unit=0, seconds=4.0),)


def test_what_is_needed_last_goes_last() -> None:
    """Wire: second 4-5, first 6-7, third 7-13; forward 7-9 and, after a wait, 13-14."""
    told = run(wired(1, 1), wired(0, 1), wired(2, 6))
    assert told.step == 14
    assert told.waits == (Wait(0, 0, 1.0), Wait(2, 2, 4.0))


def test_cut_in_two_it_fills_the_wire_before_and_after() -> None:
    """Wire: third[0] 2-5, second 5-6, first 6-7, third[1] 7-10: forward 7-9 and 10-11."""
    told = run(wired(2, 3), wired(1, 1), wired(0, 1), wired(2, 3))
    assert told.step == 11


def test_the_order_is_kept_although_a_later_job_is_ready() -> None:
    """First (ready at 6) is launched first: nobody sends before."""
    assert run(wired(0, 1), wired(2, 1), wired(1, 1)).waits == (Wait(0, 0, 1.0), Wait(1, 1, 1.0))


def test_a_barrier_waits_for_everything_and_updates_by_itself() -> None:
    """Last exchange at 13, updates until 16, then data, forward and nothing else to wait for."""
    told = run(wired(1, 1), wired(0, 1), wired(2, 6), update=(1.0, 1.0, 1.0), rival=True, data=0.5)
    assert told.step == 13 + 3 + 0.5 + 3
    assert told.waits == (Wait(-1, 2, 7.0),)


def test_updates_wait_for_the_step_that_allows_them() -> None:
    """Exchanged at 3, but the optimizer steps at 6: updated at 7.5, which the third forward at 8 does not notice."""
    assert run(wired(2, 1), update=(0.0, 0.0, 1.5)).step == 9
    assert run(wired(2, 1), update=(0.0, 0.0, 2.5)).step == 9.5


def test_one_lane_holds_the_next_launch_until_decode_has_ended() -> None:
    """One lane: third 2-3 sends, decodes 3-6, second 6-7 sends, decodes 7-10; two: decodes until 8, wire free."""
    layers = tuple(Layer(layer.name, 1.0, 2.0, tuple(u - 1 for u in layer.needs if u)) for layer in LAYERS)
    jobs = tuple(Job(unit, unit + 1, 0.0, (Transfer(0.0, 1.0),), decode=3.0) for unit in (1, 0))
    one, two = (simulate(Scenario(layers, jobs, (0.0, 0.0), lanes=lanes)) for lanes in (1, 2))
    assert one.waits == (Wait(1, 0, 3.0),)
    assert two.waits == (Wait(1, 0, 1.0),)


def test_an_update_that_is_due_waits_for_a_lane_too() -> None:
    """Third is exchanged at 3, its update due at 6; the only lane first sends (6-10) and updates (10-11) first."""
    jobs = (wired(2, 1), wired(0, 4))
    assert run(*jobs, update=(1.0, 0.0, 3.0), lanes=1).waits == (Wait(0, 0, 5.0), Wait(2, 2, 1.0))
    assert run(*jobs, update=(1.0, 0.0, 3.0), lanes=2).waits == (Wait(0, 0, 5.0),)


def test_rounds_of_different_numbers_share_the_wire() -> None:
    """Both ready at 6. a's round 1: 6-8. Then a's round 2 and b's round 1 share: both until 12; b's 2: 12-14."""
    two = (Transfer(0.0, 2.0), Transfer(0.0, 2.0))
    told = run(Job(0, 0, 0.0, two), Job(1, 0, 0.0, two))
    assert told.waits == (Wait(0, 0, 6.0), Wait(1, 1, 1.0))


def test_rounds_of_the_same_number_follow_each_other_with_their_latencies() -> None:
    """Latency 1, wire 1, twice: 6-8, 8-10. Pipelined, the second latency passes beside the first transfer: 9."""
    jobs = (Job(0, 0, 0.0, (Transfer(1.0, 1.0),)), Job(1, 0, 0.0, (Transfer(1.0, 1.0),)))
    assert run(*jobs).waits == (Wait(0, 0, 2.0), Wait(1, 1, 1.0))
    assert run(*jobs, pipelined=True).waits == (Wait(0, 0, 2.0),)


def test_encode_between_and_decode_lie_where_they_belong() -> None:
    job = Job(0, 0, 0.25, (Transfer(0.5, 1.0), Transfer(0.5, 2.0)), between=0.125, decode=4.0)
    assert run(job).step == 6 + 0.25 + 1.5 + 0.125 + 2.5 + 4 + 3


def test_contention_takes_its_share_from_both() -> None:
    """Encoding 1 beside the second backward (2): both at half speed from 2 to 4, then backward alone until 5."""
    job = Job(2, 2, 1.0, (Transfer(0.0, 0.5),))
    assert run(job, contention=1.0).step == 10
    assert run(job, contention=0.5).step == 9.5
    assert run(job, contention=0.0).step == 9


def test_a_unit_that_no_layer_needs_is_waited_for_before_backward() -> None:
    layers = (Layer("only", 1.0, 1.0),)
    told = simulate(Scenario(layers, (Job(0, 0, 0.0, (Transfer(0.0, 5.0),)),), (0.5,)))
    assert told.step == 6.5
    assert told.waits == (Wait(-1, 0, 4.5),)


def test_nothing_to_send() -> None:
    assert run().step == 9
    assert run(Job(1, 1, 0.5, (), decode=0.5)).step == 9


def test_spans_lay_the_same_out_and_the_analysis_reads_them() -> None:
    jobs = (wired(2, 6), wired(1, 1), wired(0, 1))
    told = simulate(Scenario(LAYERS, jobs, (0.5,) * 3, data=0.5), spans=True, steps=3)
    steps = [(s.step, s.end - s.start) for s in told.spans if s.lane == "step"]
    assert steps == [(n, round(told.step * 1e9)) for n in (1, 2, 3)]
    shares = partition(told.spans)
    assert shares[1] == shares[2] == shares[3]
    told_by_analysis = {phase: ns / 1e9 for phase, ns in shares[1].items() if ns}
    # Wire until 10, and first's update until 10.5. Of those 4.5 data is shown by itself,
    # and the updates of third (8-8.5) and second (9-9.5) are shown before the exchange beside them.
    expected = {"forward": 3, "backward": 6, "data": 0.5, "exposed_exchange": 2.5, "update": 1.5}
    assert told_by_analysis == pytest.approx(expected)
    named = {(s.lane, s.name, s.unit) for s in told.spans}
    assert {("forward", "first", ""), ("exchange", "exchange", "third"), ("update", "update", "first")} <= named


def test_spans_of_parts_and_of_a_barrier() -> None:
    jobs = (wired(2, 3, decode=1.0), wired(1, 1), wired(0, 1), wired(2, 3))
    told = simulate(Scenario(LAYERS, jobs, (1.0,) * 3, rival=True), spans=True)
    assert told.step == simulate(Scenario(LAYERS, jobs, (1.0,) * 3, rival=True)).step
    assert {"third[0]", "third[1]", "second", "first"} == {s.unit for s in told.spans if s.lane == "exchange"}
    assert {s.end - s.start for s in told.spans if s.lane == "update"} == {3_000_000_000}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 0}, "lanes=0"),
        ({"contention": 1.5}, "0 to 1"),
        ({"layers": ()}, "needs a layer"),
        ({"update": (0.0,)}, "unit"),
        ({"data": -1.0}, "times are 0 or more"),
        ({"jobs": (wired(0, -1.0),)}, "times are 0 or more"),
        ({"jobs": (Job(0, 7, 0.0, ()),)}, "3 layers"),
        ({"layers": (Layer("a", 1, 1, (0,)), Layer("b", 1, 1, (0,)))}, "first touched once"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    good = Scenario(LAYERS, (), (0.0,) * 3)
    with pytest.raises(UsageError, match=message):
        good.with_(**change)


def test_an_order_names_each_job_once() -> None:
    with pytest.raises(UsageError, match="each of the 1 jobs once"):
        Scenario(LAYERS, (wired(0, 1),), (0.0,) * 3).ordered([0, 0])
