"""The link that was asked for is the link that is there."""

import pytest

from syncline.cluster import Cluster
from syncline.cluster.measure import measure_bandwidth
from syncline.errors import UsageError

pytestmark = pytest.mark.namespaces


@pytest.mark.parametrize("bandwidth", [100_000_000, 1_000_000_000])
def test_measured_is_within_a_tenth_of_asked_both_ways(bandwidth: int) -> None:
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


def test_a_link_without_a_limit_is_faster() -> None:
    with Cluster(2) as cluster:
        assert measure_bandwidth(cluster, seconds=0.2) > 2e9


@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 2), (-1, 0)])
def test_there_must_be_two_nodes(source: int, target: int) -> None:
    with Cluster(2) as cluster, pytest.raises(UsageError, match="name two of the nodes 0 to 1"):
        measure_bandwidth(cluster, source=source, target=target)
