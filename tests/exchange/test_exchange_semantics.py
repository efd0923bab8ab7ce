"""What exchanges do to the values, without ranks: against plain formulas, and the law that nothing gets lost."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "codecs"))
from codec_table import SPECS, momentum_of

from syncline import codecs, exchange
from syncline.codecs import Gather, Merge, Sum, coder
from syncline.errors import UsageError
from syncline.exchange import emulate

COUNT = 103


def data(world: int) -> list[Tensor]:
    return [torch.randn(COUNT, generator=torch.Generator().manual_seed(r)) for r in range(world)]


def coarse_encode(x: Tensor) -> tuple[Tensor]:
    return (torch.round(x * 4).clamp(-127, 127).to(torch.int8),)


def coarse_decode(payload: tuple[Tensor], count: int) -> Tensor:
    return payload[0].float() / 4


COARSE = coder(coarse_encode, coarse_decode)


def rounded(x: np.ndarray) -> np.ndarray:
    return np.round(x * 4) / 4


def shards(world: int) -> list[slice]:
    return [slice(COUNT * i // world, COUNT * (i + 1) // world) for i in range(world)]


def sharded(x: list[np.ndarray]) -> np.ndarray:
    out = np.zeros(COUNT, np.float32)
    for owner, part in enumerate(shards(len(x))):
        total = sum(v[part] if rank == owner else rounded(v[part]) for rank, v in enumerate(x))
        out[part] = rounded(total / np.float32(len(x)))
    return out


def ring(x: list[np.ndarray]) -> np.ndarray:
    out = np.zeros(COUNT, np.float32)
    for first, part in enumerate(shards(len(x))):
        total = x[first][part]
        for hop in range(1, len(x)):
            total = rounded(total) + x[(first + hop) % len(x)][part]
        out[part] = rounded(total / np.float32(len(x)))
    return out


def rank_zero(x: list[np.ndarray]) -> np.ndarray:
    return rounded((x[0] + sum(rounded(v) for v in x[1:])) / np.float32(len(x)))


def everyone(x: list[np.ndarray]) -> np.ndarray:
    return sum(rounded(v) for v in x) / np.float32(len(x))


def nodes_of_two(x: list[np.ndarray]) -> np.ndarray:
    sums = [sum(x[i : i + 2]) for i in range(0, len(x), 2)]
    means = [s * np.float32(len(sums) / len(x)) for s in sums]
    if len(means) == 1:
        return means[0]
    return everyone(means) if len(means) == 2 else sharded(means)


def two_servers(x: list[np.ndarray]) -> np.ndarray:
    out = np.zeros(COUNT, np.float32)
    for owner, part in enumerate(shards(2), start=len(x) - 2):
        total = sum(v[part] if rank == owner else rounded(v[part]) for rank, v in enumerate(x))
        out[part] = rounded(total / np.float32(len(x)))
    return out


PLAIN = {
    "sharded": sharded,
    "ring": ring,
    "gather-scatter": rank_zero,
    "allgather": everyone,
    "hierarchical": nodes_of_two,
    "server(servers=2)": two_servers,
}


@pytest.mark.parametrize(
    ("name", "world"),
    # Two servers need two ranks.
    [(name, world) for name in PLAIN for world in (1, 2, 3, 4, 7) if world > 1 or name != "server(servers=2)"],
)
def test_lossy_values_are_what_the_formula_says(name: str, world: int) -> None:
    x = data(world)
    answers, _ = emulate(name)([Merge(t, COARSE) for t in x])
    for out in answers:
        # Sums in another order may fall on the other side of a rounding boundary: a quarter, rarely.
        difference = np.abs(out.mean.numpy() - PLAIN[name]([t.numpy() for t in x]))
        assert (difference > 1e-5).mean() < 0.02
        assert torch.equal(out.mean, answers[0].mean)


@pytest.mark.parametrize(
    "name",
    [
        *("sharded", "ring", "gather-scatter", "allgather", "server", "hierarchical"),
        *("hierarchical(node=3, between=ring)", "hierarchical(node=3, between=sharded)"),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_the_shares_add_up_to_the_result(name: str, world: int) -> None:
    answers, _ = emulate(name)([Merge(t, COARSE) for t in data(world)])
    torch.testing.assert_close(sum(out.own for out in answers) / world, answers[0].mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [s for s in SPECS if codecs.build(s).feedback and "optimizer_momentum" not in s])
def test_mean_gradient_plus_residuals_is_kept_over_every_exchange(spec: str) -> None:
    world = 3
    for name in exchange.legal(spec):
        states: list[dict[str, Tensor]] | None = None
        for step in range(3):
            before = states or [{} for _ in range(world + 1)]
            grads = [[torch.randn(33, 20, generator=torch.Generator().manual_seed(7 * step + r))] for r in range(world)]
            result = exchange.lockstep(spec, grads, exchange=name, states=states, first_step=step)
            states = result.states
            extra = sum(momentum_of(spec, s, "p0") for s in before)
            old, new = (sum(s.get("p0.error", torch.zeros(33, 20)) for s in group) for group in (before, states))
            left = (sum(g[0] for g in grads) + extra + old) / world
            # An all-reduce sums halves in half precision: that rounding is nobody's.
            rough = name == "allreduce" and "16" in spec
            close = {"rtol": 2e-2, "atol": 2e-2} if rough else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(left, result.outputs[0][0] + new / world, msg=f"{spec} over {name}", **close)


def test_a_servers_loss_stays_with_the_server() -> None:
    x = [*data(3), torch.zeros(COUNT), torch.zeros(COUNT)]
    answers, _ = emulate("server(servers=2, dedicated=true)")([Merge(t, COARSE) for t in x])
    torch.testing.assert_close(sum(out.own for out in answers) / 3, answers[0].mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(answers[0].mean, sum(x) / 3, rtol=0, atol=0.3)


@pytest.mark.parametrize("name", exchange.available())
def test_sums_of_whole_numbers_are_exact(name: str) -> None:
    workers = exchange.build(name).workers(4)
    requests = [Sum(torch.full((5,), 3 if r < workers else 0, dtype=torch.int32)) for r in range(4)]
    answers, _ = emulate(name)(requests)
    assert all(torch.equal(a, torch.full((5,), 3 * workers, dtype=torch.int32)) for a in answers)


def test_every_illegal_pair_is_refused_with_the_legal_names() -> None:
    refused = 0
    for spec in ["none", "bf16", "int8", "topk(0.1) | int8", "dgc", "powersgd", "powersgd | int8", "randomk | bf16"]:
        legal = exchange.legal(spec)
        for name in exchange.available():
            if name in legal:
                assert str(exchange.check(spec, name)) == name
                continue
            refused += 1
            with pytest.raises(UsageError) as error:
                exchange.check(spec, name)
            text = str(error.value)
            assert f"codec '{codecs.build(spec)}'" in text
            assert f"exchange '{name}'" in text
            assert text.endswith("use " + ", ".join(legal))
    assert refused == 3 + 5
    assert exchange.legal("dgc") == ["allgather", "gather-scatter"]
    assert "allreduce" in exchange.legal("powersgd | bf16")


def test_requests_that_slip_past_the_check_are_refused_too() -> None:
    with pytest.raises(UsageError, match="use allgather"):
        emulate("allreduce")([Merge(torch.ones(3), COARSE)])
    with pytest.raises(UsageError, match="use allgather, gather-scatter"):
        emulate("ring")([Gather((torch.ones(3),))])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("rings", "did you mean 'ring'"),
        ("ring(3)", "ring takes (no arguments)"),
        ("server(workers=3)", "server takes (servers=1, dedicated=False)"),
        ("ring | ring", "is a chain"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        exchange.build(spec)
    assert words in str(error.value)


def test_servers_must_leave_a_worker() -> None:
    with pytest.raises(UsageError, match="use 1 to 1 servers"):
        exchange.build("server(servers=2, dedicated=true)").workers(2)
    with pytest.raises(UsageError, match="use 1 to 2 servers"):
        exchange.build("server(servers=3)").workers(2)


def test_bytes_follow_the_textbook() -> None:
    dense = codecs.build("none")
    size, world = 4 * 1200, 4
    expected = {"allreduce": 2 * 3 * size / 4, "ring": 2 * 3 * size / 4, "sharded": 2 * 3 * size / 4,
                "allgather": 3 * size, "gather-scatter": 3 * size, "server": 3 * size}  # fmt: skip
    for name, sent in expected.items():
        assert dense.wire_bytes((1200,), world_size=world, exchange=exchange.build(name)) == sent, name


@pytest.mark.parametrize(
    ("name", "between", "inside"),
    [
        ("allreduce", 1.5, 1.5),  # a ring of four passes every boundary of a node once
        ("ring", 1.5, 1.5),
        ("sharded", 2, 0.5),
        ("allgather", 3, 3),
        ("hierarchical(node=2)", 1, 1),
        ("hierarchical(node=2, between=sharded)", 1, 1),
        ("hierarchical(node=1)", 2, 0.5),  # as sharded: its nodes are not those of the machine
    ],
)
def test_bytes_between_two_nodes_of_two_ranks(name: str, between: float, inside: float) -> None:
    (one,) = codecs.build("none").rounds((1200,), torch.float32)
    assert exchange.build(name).node_bytes(one, 4, 2) == (between * 4800, inside * 4800)


def test_a_codec_compresses_between_nodes_only() -> None:
    (one,) = codecs.build("bf16").rounds((1200,), torch.float32)
    assert exchange.build("hierarchical(node=2)").node_bytes(one, 4, 2) == (2400, 4800)


def test_the_ranks_per_node_are_filled_in_where_they_are_left_out() -> None:
    assert exchange.resolved("hierarchical", node=4) == "hierarchical(node=4)"
    assert exchange.resolved("hierarchical(between=ring)", node=4) == "hierarchical(node=4, between=ring)"
    assert exchange.resolved("hierarchical(node=2)", node=4) == "hierarchical(node=2)"
    assert exchange.resolved("hierarchical(2)", node=4) == "hierarchical(2)"
    assert exchange.resolved("server(servers=2)", node=4) == "server(servers=2)"
