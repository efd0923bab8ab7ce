"""Every legal pair of codec and exchange over real Gloo ranks gives what lockstep gives, and sends as many bytes."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "codecs"))
from codec_table import CHAINS, SPECS
from over_gloo import every_pair, grads, loaded

from syncline import exchange

STEPS = 2


def pairs_for(world: int, *, all_pairs: bool = False) -> list[tuple[str, str]]:
    pairs = []
    # Chains once, at an odd number of ranks; every codec at every number.
    for spec in SPECS if world == 3 else [s for s in SPECS if s not in CHAINS]:
        names = exchange.legal(spec)
        pairs += [(spec, name) for name in names]
        if "hierarchical" in names:
            pairs += [(spec, f"hierarchical(node=2, between={b})") for b in ("ring", "sharded")]
        if "server" in names:
            pairs.append((spec, "server(servers=2, dedicated=true)" if world > 3 else "server(dedicated=true)"))
    # All with three ranks; with two one half and with four the other, unless all are asked for.
    return pairs if world == 3 or all_pairs else pairs[world // 2 - 1 :: 2]


def chosen(world: int, codecs: str) -> list[tuple[str, str]]:
    """All pairs, codecs alone, or every chain over every other one of its exchanges."""
    if codecs == "all":
        return pairs_for(world, all_pairs=True)
    pairs = [pair for pair in pairs_for(world) if (pair[0] in CHAINS) == (codecs != "single")]
    return pairs[::2] if codecs == "some chains" else pairs


@pytest.mark.parametrize("world", [2, 4])
def test_every_codec_and_every_exchange_is_in_each_half(world: int) -> None:
    codecs, names = (set(side) for side in zip(*pairs_for(world), strict=True))
    assert codecs == set(SPECS) - set(CHAINS)
    assert {name.partition("(")[0] for name in names} == {name.partition("(")[0] for _, name in pairs_for(3)}


def test_every_chain_and_every_exchange_of_chains_is_in_the_half() -> None:
    some, every = (chosen(3, codecs) for codecs in ("some chains", "chains"))
    assert {spec for spec, _ in some} == {spec for spec, _ in every} == set(CHAINS)
    assert {name.partition("(")[0] for _, name in some} == {name.partition("(")[0] for _, name in every}


@pytest.mark.parametrize(
    ("world", "codecs"),
    [
        (2, "single"),
        pytest.param(3, "some chains", marks=pytest.mark.full),
        pytest.param(4, "single", marks=pytest.mark.full),
        *(pytest.param(world, "all", marks=pytest.mark.full) for world in (2, 3, 4)),
    ],
)
def test_every_legal_pair_equals_lockstep(world: int, codecs: str) -> None:
    pairs = chosen(world, codecs)
    ranks = [loaded(data) for data in run_ranks(every_pair, world, pairs, STEPS, timeout=110)]
    for spec, name in pairs:
        workers = exchange.build(name).workers(world)
        want = exchange.lockstep(spec, grads, STEPS, exchange=name, world_size=workers)
        # A backend's all-reduce adds in an order of its own; whatever we add ourselves is equal to the bit.
        tolerance = 0.0
        if name == "allreduce":
            tolerance = 2e-2 if "16" in spec else 1e-4
        for rank in range(world):
            outputs, state, sent = ranks[rank][f"{spec} over {name}"]
            where = f"{spec} over {name}, rank {rank} of {world}"
            for got, expected, first in zip(
                outputs, want.outputs[rank], ranks[0][f"{spec} over {name}"][0], strict=True
            ):
                assert torch.equal(got, first), f"ranks differ: {where}"
                torch.testing.assert_close(
                    got, expected, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, where)
                )
            assert state.keys() == want.states[rank].keys(), where
            for key, tensor in state.items():
                torch.testing.assert_close(
                    tensor, want.states[rank][key], rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, where)
                )
            assert sent == want.wire_bytes[rank], where
