"""Measured bandwidth of links, also while it changes."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncline.cluster import Cluster
from syncline.cluster.measure import measure_bandwidth
from syncline.errors import UsageError

pytestmark = pytest.mark.namespaces


@pytest.mark.alone
@pytest.mark.parametrize("bandwidth", [100_000_000, 1_000_000_000])
def test_measured_bandwidth_is_within_a_tenth_in_both_directions(bandwidth: int) -> None:
    with Cluster(2, bandwidth=bandwidth) as cluster:
        for source in (0, 1):
            measured = best_of_three(cluster, source=source, enough=0.9 * bandwidth)
            assert measured == pytest.approx(bandwidth, rel=0.1)


def best_of_three(cluster: Cluster, *, source: int, enough: float) -> float:
    """Busy cores can only take from what a link carries, so a second look is fair; too much never is."""
    best = 0.0
    for _ in range(3):
        best = max(best, measure_bandwidth(cluster, source=source, target=1 - source, seconds=0.5))
        if best >= enough:
            break
    return best


@pytest.mark.alone
def test_a_link_without_a_limit_is_faster() -> None:
    with Cluster(2) as cluster:
        assert measure_bandwidth(cluster, seconds=0.2) > 2e9


@pytest.mark.alone
def test_a_changed_rate_holds_in_both_directions() -> None:
    with Cluster(2, bandwidth="200Mbit") as cluster:
        before = [best_of_three(cluster, source=source, enough=190e6) for source in (0, 1)]
        cluster.set_bandwidth("100Mbit")
        assert cluster.bandwidth == 100_000_000
        for source in (0, 1):
            after = best_of_three(cluster, source=source, enough=95e6)
            assert after / before[source] == pytest.approx(0.5, rel=0.15)
        cluster.set_bandwidth(None)
        assert measure_bandwidth(cluster, seconds=0.2) > 1.5e8
        cluster.set_bandwidth(100_000_000)
        assert best_of_three(cluster, source=0, enough=90e6) == pytest.approx(1e8, rel=0.1)


def test_a_running_transfer_survives_every_change() -> None:
    """A packet that waits, larger than the burst of a slower link, would wait for ever."""
    rates = ["100Mbit", "20Mbit", None, "8Mbit", "200Mbit"]
    with Cluster(2, bandwidth="1Gbit") as cluster, ThreadPoolExecutor(max_workers=4) as pool:
        streams = [pool.submit(measure_bandwidth, cluster, seconds=1.5) for _ in range(4)]
        for rate in rates:
            time.sleep(0.3)
            cluster.set_bandwidth(rate)
        assert all(stream.result() > 0 for stream in streams)


def test_rates_that_cannot_be_shaped_change_nothing() -> None:
    with Cluster(2, bandwidth="100Mbit") as cluster:
        for wrong in ("1bit", "100Gbit", "fast"):
            with pytest.raises(UsageError):
                cluster.set_bandwidth(wrong)
        assert cluster.bandwidth == 100_000_000
    with pytest.raises(UsageError, match="before close"):
        cluster.set_bandwidth("1Gbit")


@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 2), (-1, 0)])
def test_measuring_needs_two_nodes(source: int, target: int) -> None:
    with Cluster(2) as cluster, pytest.raises(UsageError, match="name two of the nodes 0 to 1"):
        measure_bandwidth(cluster, source=source, target=target)
