"""Clusters are made, isolated from each other and from the machine, and removed."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import held_namespaces, host_interfaces

from syncline.cluster import Cluster, Node, enter, network
from syncline.cluster.capabilities import capabilities
from syncline.errors import UsageError

pytestmark = pytest.mark.namespaces

_LOOK = """
import socket, sys
from syncline.cluster import enter
enter(sys.argv[1])
print(*sorted(name for _, name in socket.if_nameindex()))
print(socket.create_server((sys.argv[2], 0)).getsockname()[0])
"""


def look(node: Node) -> list[str]:
    """What another process sees inside a node: the interfaces, and the address it could bind."""
    command = [sys.executable, "-c", _LOOK, node.netns, node.address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_nodes_have_their_own_interface_and_address() -> None:
    with Cluster(3, bandwidth="1Gbit") as cluster:
        assert cluster.bandwidth == 10**9
        assert [node.index for node in cluster.nodes] == [0, 1, 2]
        assert len({node.address for node in cluster.nodes}) == 3
        for node in cluster.nodes:
            assert look(node) == [f"lo {node.interface}", node.address]


def test_the_machine_sees_nothing_and_close_is_idempotent() -> None:
    before = host_interfaces()
    cluster = Cluster(2)
    assert host_interfaces() == before
    assert len(held_namespaces()) >= 3
    cluster.close()
    cluster.close()
    with pytest.raises(OSError, match="is its cluster still running"):
        enter(cluster.nodes[0])


def test_two_clusters_at_once_are_isolated() -> None:
    with Cluster(2) as one, Cluster(2) as two:
        assert one.nodes[0].address == two.nodes[0].address
        namespaces = {Path(node.netns).stat().st_ino for node in one.nodes + two.nodes}
        assert len(namespaces) == 4
        one.close()
        assert look(two.nodes[1]) == [f"lo {two.nodes[1].interface}", two.nodes[1].address]


def test_an_error_in_the_block_removes_everything() -> None:
    with pytest.raises(ZeroDivisionError), Cluster(2):
        raise ZeroDivisionError
    assert held_namespaces() == []


def test_an_error_while_building_removes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    fired = []

    def broken(index: int) -> str:
        fired.append(index)
        raise RuntimeError("injected")

    monkeypatch.setattr(network, "address", broken)
    with pytest.raises(RuntimeError, match="injected"):
        Cluster(2)
    assert fired == [0]
    assert held_namespaces() == []


def test_only_namespaces_can_be_entered(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="cannot enter the namespace"):
        enter(str(file))


@pytest.mark.parametrize("count", [0, -1, 251])
def test_impossible_numbers_of_nodes(count: int) -> None:
    with pytest.raises(UsageError, match="choose 1 to 250"):
        Cluster(count)


@pytest.mark.parametrize("bandwidth", ["1bit", "100Gbit"])
def test_rates_that_cannot_be_shaped(bandwidth: str) -> None:
    with pytest.raises(UsageError, match="cannot be shaped"):
        Cluster(2, bandwidth=bandwidth)


def test_latency_works_with_netem_and_is_refused_without() -> None:
    if not capabilities().netem:
        for wish in ({"latency": "5ms"}, {"loss": "1%"}):
            with pytest.raises(UsageError, match="no netem"):
                Cluster(2, **wish)
        assert held_namespaces() == []
        return
    with Cluster(2, bandwidth="1Gbit", latency="20ms") as cluster:
        assert 0.04 <= round_trip(cluster) < 0.06


def round_trip(cluster: Cluster) -> float:
    """The least time of a TCP handshake between two nodes: one round trip."""
    source, target = cluster.nodes
    listen = "import socket, sys\nfrom syncline.cluster import enter\nenter(sys.argv[1])\n"
    serve = listen + "s = socket.create_server((sys.argv[2], 9000))\nprint(flush=True)\nwhile True: s.accept()"
    with subprocess.Popen(
        [sys.executable, "-c", serve, target.netns, target.address], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        connect = (
            listen + "import time\n"
            "def once():\n"
            "    start = time.perf_counter()\n"
            "    socket.create_connection((sys.argv[2], 9000)).close()\n"
            "    return time.perf_counter() - start\n"
            "print(min(once() for _ in range(5)))"
        )
        command = [sys.executable, "-c", connect, source.netns, target.address]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        server.kill()
    return float(result.stdout)


def test_twenty_nodes_are_made_quickly() -> None:
    start = time.monotonic()
    with Cluster(20, bandwidth="1Gbit") as cluster:
        assert len(cluster.nodes) == 20
    assert time.monotonic() - start < 10
    assert socket.if_nameindex()
