"""Closed forms of exchanges, and the fit of a network."""

import math
import random
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import vgg19

from syncline import codecs
from syncline.errors import UsageError
from syncline.exchange import available
from syncline.exchange import build as build_exchange
from syncline.sim import Job, Network, Scenario, Transfer, fit, simulate

NET = Network(latency=1.0, bytes_per_s=100.0)


@pytest.mark.parametrize(
    ("exchange", "nodes", "latency", "wire"),
    [
        ("allreduce", 2, 2, 6),
        ("allreduce", 4, 6, 9),
        ("allgather", 4, 3, 18),
        ("sharded", 4, 2, 9),
        ("ring", 4, 6, 9),
        ("gather-scatter", 4, 2, 36),
        ("server", 4, 2, 36),  # three others and one server: in and out of its link
        ("server(servers=2)", 4, 2, 9 + 9),  # in from three others half each, and out to them
        ("server(servers=4)", 4, 2, 9),  # as sharded
        ("server(dedicated=true)", 4, 2, 36),
        ("server(servers=2, dedicated=true)", 4, 2, 6 + 9),  # in from two workers, out to two workers and a peer
        ("hierarchical(node=2)", 4, 2 + 1, 60 + 3),  # half of the plain values in and out, half of a payload between
        ("hierarchical(node=2, between=ring)", 8, 2 + 6, 60 + 4.5),
        ("hierarchical(node=2, between=sharded)", 3, 2 + 2, 120 + 6),  # one rank of each node carries everything
        ("hierarchical(node=4)", 4, 2, 90),
        ("allreduce", 1, 0, 0),
    ],
)
def test_forms_by_hand(exchange: str, nodes: int, latency: float, wire: float) -> None:
    assert NET.transfer(exchange, 600, nodes, plain=6000) == Transfer(latency, pytest.approx(wire))


@pytest.mark.parametrize("exchange", ["allreduce", "allgather", "sharded", "ring"])
def test_bytes_are_those_that_the_exchange_sends(exchange: str) -> None:
    codec = codecs.build("none")
    (one,) = codec.rounds((1200,), torch.float32)
    sent = build_exchange(exchange).sent_bytes(one, 4)
    assert max(sent) == Network(0.0, 1.0).transfer(exchange, 4800, 4).wire


def test_latency_of_a_tree_and_what_a_launch_costs() -> None:
    tree = Network(1.0, 100.0, launch=0.5, tree=True)
    assert tree.transfer("allreduce", 0, 8) == Transfer(6.5, 0)
    assert tree.transfer("allgather", 0, 1000) == Transfer(10.5, 0)
    assert tree.transfer("ring", 0, 8) == Transfer(14.5, 0)  # our own ring is a ring
    assert tree.seconds("allreduce", 100, 2) == 0.5 + 2 + 1


def test_links_inside_a_node_do_not_fill_the_wire() -> None:
    fast = Network(1.0, 100.0, inside=Network(0.25, 1e4))
    assert fast.transfer("hierarchical(node=2)", 600, 4, plain=6000) == Transfer(1 + 0.5 + 0.6, 6)


@settings(deadline=None)
@given(st.integers(2, 10_000), st.floats(1, 1e9))
def test_no_exchange_sends_less_than_what_a_sum_needs(nodes: int, size: float) -> None:
    least = 2 * (nodes - 1) / nodes * size / NET.bytes_per_s
    for exchange in ("allreduce", "sharded", "ring", "server", "gather-scatter"):
        assert NET.transfer(exchange, size, nodes).wire >= least * (1 - 1e-9)
    assert NET.transfer("hierarchical(node=1)", size, nodes).wire == pytest.approx(least)


def test_every_exchange_has_a_form() -> None:
    for exchange in available():
        assert NET.seconds(exchange, 100, 4) > 0


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match=r"unknown exchange_time 'rign': did you mean 'ring'\? \(known: allgather, "):
        NET.transfer("rign", 1, 2)
    with pytest.raises(UsageError, match="use 1 to 1 servers"):
        NET.transfer("server(servers=2, dedicated=true)", 1, 2)
    with pytest.raises(UsageError, match=r"ring takes \(no arguments\)"):
        NET.transfer("ring(hops=2)", 1, 2)
    with pytest.raises(UsageError, match="1 or more ranks per node"):
        NET.transfer("hierarchical(node=0)", 1, 2)
    with pytest.raises(UsageError, match="more than 0"):
        Network(0.0, 0.0)
    with pytest.raises(UsageError, match="at least one"):
        fit([])


def test_a_fit_finds_the_network_behind_noise_and_outliers() -> None:
    rng = random.Random(0)
    true = Network(3e-4, 119e6)
    sizes = [1 << k for k in range(10, 25)] * 6
    for exchange in (None, "allreduce", "sharded", "allgather"):
        samples = []
        for size in sizes:
            seconds = true.seconds(exchange, size, 4) if exchange else true.latency + size / true.bytes_per_s
            samples.append((size, seconds * rng.uniform(0.95, 1.05) * (20 if rng.random() < 0.1 else 1)))
        found = fit(samples, exchange=exchange, nodes=4)
        assert found.latency == pytest.approx(true.latency, rel=0.15)
        assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.05)


def test_fits_at_the_edges() -> None:
    assert fit([(100, 2.0)]) == Network(0.0, 50.0)
    assert fit([(100, 1.0), (200, 4.0)]).latency == 0  # a line would start below zero
    assert fit([(100, 2.0), (200, 2.0)]) == Network(2.0, math.inf)
    assert fit([(0, 2.0), (0, 4.0)]).bytes_per_s == math.inf
    many = [(float(size), 0.5 + size / 1e3) for size in range(5000)]
    found = fit(many)
    assert (found.latency, found.bytes_per_s) == (pytest.approx(0.5), pytest.approx(1e3))


def _dense(nodes: int, bandwidth: float) -> Scenario:
    network = Network(5e-5, bandwidth, tree=True)
    whole = vgg19(0.1)
    return whole.with_(
        jobs=tuple(Job(j.unit, j.ready, 0.0, (network.transfer("allreduce", 3e7, nodes),)) for j in whole.jobs)
    )


def test_ten_thousand_nodes_and_ten_bandwidths_in_seconds() -> None:
    nodes = [1, 2, 4, 8, 16, 64, 256, 1024, 4096, 10_000]
    bandwidths = [1.25e8 * 2**k for k in range(10)]
    begin = time.perf_counter()
    rows = [[simulate(_dense(n, bandwidth)) for bandwidth in bandwidths] for n in nodes]
    assert time.perf_counter() - begin < 5
    assert all(one.step >= one.bound - 1e-12 for row in rows for one in row)
    assert rows[-1][0].step > 10 * rows[0][0].step
    assert rows[0][-1].step == rows[0][0].step
    assert all(slow.step >= fast.step - 1e-12 for row in rows for slow, fast in pairwise(row))
