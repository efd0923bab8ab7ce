"""Queueing disciplines of links: pure functions, so also those that this kernel may lack."""

import sys

import pytest

from syncline.cluster import network
from syncline.cluster.network import LinkShape, build, downlink, uplink
from syncline.errors import UsageError


def test_rate_is_in_bytes_and_burst_and_queue_follow_it() -> None:
    (gigabit,) = downlink(LinkShape(bandwidth=10**9))
    assert gigabit.kind == "tbf"
    assert gigabit.options == {"rate": 125_000_000, "burst": 524_288, "limit": 524_288 + 6_250_000}
    (slow,) = downlink(LinkShape(bandwidth=10**6))
    assert slow.options["burst"] == 32 * 1024


def test_both_directions_have_the_same_rate() -> None:
    assert uplink(LinkShape(bandwidth=10**8)) == downlink(LinkShape(bandwidth=10**8))


def test_an_unlimited_link_is_not_shaped() -> None:
    assert uplink(LinkShape()) == downlink(LinkShape()) == []


def test_latency_and_loss_apply_once_per_path_and_before_the_rate() -> None:
    link = LinkShape(bandwidth=10**9, latency=0.005, loss=0.01)
    netem, tbf = uplink(link)
    assert (netem.kind, netem.handle) == ("netem", "1:")
    assert netem.options == {"delay": 5000, "loss": 1.0, "limit": 1000}
    assert (tbf.kind, tbf.handle, tbf.options["parent"]) == ("tbf", "10:", "1:1")
    assert [qdisc.kind for qdisc in downlink(link)] == ["tbf"]


def test_a_long_fat_link_has_room_for_packets_in_flight() -> None:
    netem = uplink(LinkShape(bandwidth=10**10, latency=0.1))[0]
    assert netem.options["limit"] >= 2 * 10**10 * 0.1 / 8 / 1514


class Kernel:
    """A fake kernel that records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    def tc(self, verb: str, kind: str = "", index: int = 0, handle: str = "", **options: object) -> None:
        self.calls.append((verb, kind, handle))


@pytest.mark.parametrize(
    ("before", "after", "calls"),
    [
        (LinkShape(10**9), LinkShape(10**8), [("replace", "tbf", "1:")]),
        (LinkShape(), LinkShape(10**8), [("replace", "tbf", "1:")]),
        (LinkShape(10**8), LinkShape(), [("del", "", "1:")]),
        (LinkShape(), LinkShape(), []),
        (LinkShape(10**9, 0.01), LinkShape(10**8, 0.01), [("replace", "netem", "1:"), ("replace", "tbf", "10:")]),
        (LinkShape(10**9, 0.01), LinkShape(None, 0.01), [("replace", "netem", "1:"), ("del", "", "10:")]),
    ],
)
def test_a_change_is_made_in_place(before: LinkShape, after: LinkShape, calls: list[tuple[str, str, str]]) -> None:
    kernel = Kernel()
    network._reshape(kernel, 1, uplink(before), uplink(after))
    assert kernel.calls == calls


def test_missing_pyroute2_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    keep: list[int] = []
    with pytest.raises(UsageError, match="pip install pyroute2"):
        build(1, link=LinkShape(), keep=keep)
    assert keep == []
