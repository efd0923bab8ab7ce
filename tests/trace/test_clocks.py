import pytest
from clock_ranks import in_node, measured, shifted
from hypothesis import given
from hypothesis import strategies as st

from ranks import run_ranks
from syncline.cluster import Cluster
from syncline.cluster.capabilities import capabilities
from syncline.cluster.ranks import Place
from syncline.cluster.ranks import run_ranks as run_rank_processes
from syncline.trace.merge.clocks import Clock, RoundTrip, clock_offset, with_drift

MS = 1_000_000
ALLOWED = 0.2 * MS

delays = st.integers(0, 50 * MS)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=20))
def test_the_true_offset_is_within_the_error_for_any_delays(offset, journeys):
    trips, at = [], 0
    for there, stay, back in journeys:
        received = at + there + offset
        trips.append(RoundTrip(at, received, received + stay, at + there + stay + back))
        at += there + stay + back + 1
    found, error = clock_offset(trips)
    assert abs(found - offset) <= error
    # One message that was fast there and another that was fast back are as good as one fast round trip.
    assert error == (min(t for t, _, _ in journeys) + min(b for _, _, b in journeys)) / 2


def test_an_offset_needs_a_round_trip():
    with pytest.raises(ValueError, match="at least one"):
        clock_offset([])


def test_drift_between_two_measurements_is_even():
    first, last = Clock(offset=1000.0, error=5.0, at=0), Clock(offset=3000.0, error=9.0, at=10 * MS)
    clock = with_drift(first, last)
    assert clock.error == 9.0
    assert [clock.align(ns) for ns in (0, 5 * MS, 10 * MS)] == [-1000, 5 * MS - 2000, 10 * MS - 3000]
    assert with_drift(last, last) == last, "no time has passed: there is nothing to divide by"


@given(st.integers(0, 10**17), st.integers(0, 10**9))
def test_alignment_keeps_the_order(start, length):
    clock = Clock(offset=1e12 / 3, drift=1e-4, error=1.0, at=10**16)
    assert clock.align(start) <= clock.align(start + length)


def test_ranks_of_one_host_measure_an_offset_of_zero():
    views = run_ranks(measured, 3)
    assert all(view == views[0][0] for view, _ in views), "all ranks know all clocks"
    zero, *others = views[0][0]
    assert zero == Clock()
    for clock in others:
        assert abs(clock.offset) <= clock.error < ALLOWED
    assert max(seconds for _, seconds in views) < 5


@pytest.mark.parametrize(("offset", "drift"), [(3_600_000 * MS, 100e-6), (-7 * MS, -2e-3)])
def test_a_shifted_and_drifting_clock_is_aligned(offset, drift):
    (zero, _), (clock, (true, told)) = run_ranks(shifted, 2, offset, drift, 0.3)
    assert zero == Clock()
    assert clock.error < ALLOWED
    assert abs(clock.offset - offset) < ALLOWED + abs(drift) * 300 * MS
    assert abs(clock.align(told) - true) < ALLOWED
    assert clock.drift == pytest.approx(drift, abs=2 * ALLOWED / (300 * MS))


@pytest.mark.namespaces
def test_clock_error_across_namespaces(tmp_path):
    able = capabilities()
    if not able.can_namespaces or not able.can_shape:
        pytest.skip(able.why)
    with Cluster(2, bandwidth="200Mbit") as cluster:
        where = [
            Place(rank, 2, node=rank, netns=node.netns, environment={"GLOO_SOCKET_IFNAME": node.interface})
            for rank, node in enumerate(cluster.nodes)
        ]
        _, (first, last) = run_rank_processes(in_node, where, str(tmp_path / "store"), logs=tmp_path)
    for clock in (first, last):
        assert abs(clock.offset) <= clock.error, "one kernel, one clock: the truth is 0"
        assert clock.error < ALLOWED
