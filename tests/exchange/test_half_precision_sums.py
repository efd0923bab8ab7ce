"""Error feedback over half-precision sums: how far the means of gradients and of what was sent and kept can differ."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import run_ranks
from syncline import codecs, exchange
from syncline.codecs import Result

STEPS, SHAPE = 5, (48, 64)
FLOAT32 = 1e-6
"""Rounding of float32, next to values of size 1."""
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""The largest relative rounding of one addition."""
OWN = ["bf16(feedback=true)", "fp16(feedback=true)", "randomk(feedback=true) | bf16", "randomk(feedback=true) | fp16"]
"""Codecs that keep back what this rank did not send, as 16-bit values that an all-reduce adds."""


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def losses(rank: int, world: int, pairs: list[tuple[str, str]]) -> list[tuple[float, float]]:
    """For each codec and exchange: the largest loss of a step, and the largest ratio of a loss to its bound."""
    results = []
    for spec, name in pairs:
        link, codec = exchange.connect(name), codecs.build(spec)
        unit = UNIT[next((half for half in UNIT if half in spec), "bf16")]
        state: dict[str, Tensor] = {}
        lost = ratio = 0.0
        for step in range(STEPS):
            numbers = torch.Generator().manual_seed(100 * step + rank)
            # Of very different sizes, and with signs that cancel.
            grad = torch.randn(SHAPE, generator=numbers) * torch.logspace(-3, 1, SHAPE[1])
            given = grad + state["error"].view(SHAPE) if state else grad
            run = codec.run(step=step, rank=rank, world=world)
            now = run.start(grad, state)
            while not isinstance(now, Result):
                now = run.resume(link.ask(now))
            state = dict(now.state)
            kept = state["error"].view(SHAPE)
            loss = (mean_over_ranks(given) - mean_over_ranks(kept) - now.output.double()).abs()
            own = mean_over_ranks((given - kept).abs())
            size = mean_over_ranks(given.abs())
            lost = max(lost, float((loss / size).max()))
            bound = ((1 + unit) ** (world - 1) - 1) * own + FLOAT32 * (size + own)
            ratio = max(ratio, float((loss / bound).max()))
        results.append((lost, ratio))
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_half_precision_all_reduce_loses_no_more_than_the_rounding_of_its_sum(world: int) -> None:
    pairs = [(spec, "allreduce") for spec in OWN]
    for results in run_ranks(losses, world, pairs):
        for (spec, _), (lost, ratio) in zip(pairs, results, strict=True):
            assert ratio <= 1, spec
            assert ratio > 0.3, f"{spec}: the bound is not far from what happens"
            assert lost > 100 * FLOAT32, f"{spec}: the loss is that of half precision"


def test_nothing_is_lost_where_sums_are_float32_or_the_residual_is_taken_against_the_mean() -> None:
    exact = [(spec, name) for spec in OWN for name in ("sharded", "ring") if name in exchange.legal(spec)]
    exact += [("powersgd(rank=2) | bf16", "allreduce"), ("topk(0.1)", "sharded"), ("int8", "ring")]
    assert len(exact) > 3 + len(OWN)
    for results in run_ranks(losses, 3, exact):
        for pair, (lost, _) in zip(exact, results, strict=True):
            assert lost < 20 * FLOAT32, pair
