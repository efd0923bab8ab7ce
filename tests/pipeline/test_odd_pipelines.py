"""Pipelines of odd models, shapes and batches against one process, also across reshapes; what they refuse."""

import pickle

import pytest
import torch
import torch.distributed as dist
from odd_models import made, piped, plain, train
from torch import nn

from ranks import run_ranks
from syncline.errors import PeerError, UsageError
from syncline.pipeline.blocks import Sublayer
from syncline.pipeline.cache import shared_cache
from syncline.pipeline.freeze import Freezer
from syncline.pipeline.freeze.apply import set_frozen
from syncline.pipeline.run import Pipeline
from syncline.pipeline.stage import StageModule
from syncline.pipeline.transfer import checksum

# ranks, model, [(frozen blocks, stages)], sizes of the batches in each of these parts
RUNS = {
    "six ranks, seven blocks": (6, {"depth": 7}, [(0, 6), (3, 3), (4, 2), (7, 1), (1, 3), (0, 6)], [7, 5]),
    "fewer samples than ranks": (3, {"depth": 5}, [(0, 3), (2, 1), (5, 3), (0, 1)], [7, 2, 1]),
    "tied weights": (4, {"tied": True}, [(0, 4), (0, 2), (0, 1), (2, 2), (0, 4)], [3, 8]),
    "several outputs": (4, {"depth": 3, "outputs": 2}, [(0, 2), (3, 1)], [4, 1]),
}


def ranges(sizes, count):
    """Consecutive global batches of these sizes, `count` times."""
    starts = [sum((sizes * count)[:n]) for n in range(len(sizes) * count)]
    return [range(start, start + size) for start, size in zip(starts, sizes * count, strict=True)]


def _run(rank, world, model, parts, sizes):
    blocks, optimizer, data = made(**model)
    pipe, losses = Pipeline(blocks, optimizer, stages=parts[0][1]), []
    batches = ranges(sizes, len(parts))
    for number, (frozen, stages) in enumerate(parts):
        set_frozen(blocks, frozen)
        pipe.reshape(stages=stages)
        losses += train(piped(pipe), optimizer, data, batches[number * len(sizes) :][: len(sizes)])
    whole, scored = pipe.state_dict(), pipe.evaluate(tuple(part[:7] for part in data))
    pipe.close()
    return losses, pickle.dumps(whole), scored[1] // pipe.shape.replicas


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(name):
    ranks, model, parts, sizes = RUNS[name]
    results = run_ranks(_run, ranks, model, parts, sizes)
    blocks, optimizer, data = made(**model)
    losses, batches = [], ranges(sizes, len(parts))
    for number, (frozen, _) in enumerate(parts):
        set_frozen(blocks, frozen)
        losses += train(plain(blocks.model), optimizer, data, batches[number * len(sizes) :][: len(sizes)])
    for found, _, answers in results:
        assert found == pytest.approx(losses, abs=1e-11)
        assert answers == 7
    saved = pickle.loads(results[0][1])
    fresh, other, _ = made(**model)
    fresh.model.load_state_dict(saved["model"])  # as one process would have saved it: strict
    other.load_state_dict(saved["optimizer"])
    for (key, value), mine in zip(blocks.model.state_dict().items(), fresh.model.state_dict().values(), strict=True):
        assert torch.allclose(value, mine, rtol=0, atol=1e-11), key


def _tied_by_hand(rank, world, stages):
    blocks, optimizer, data = made(tied=True)
    pipe = Pipeline(blocks, optimizer, stages=stages)
    blocks.model.blocks[:3].requires_grad_(False)
    losses = train(piped(pipe), optimizer, data, ranges([8], 2))
    pipe.close()
    return losses


def test_blocks_behind_an_embedding_that_trains_are_not_a_frozen_prefix():
    blocks, optimizer, data = made(tied=True)
    blocks.model.blocks[:3].requires_grad_(False)
    expected = train(plain(blocks.model), optimizer, data, ranges([8], 2))
    assert run_ranks(_tied_by_hand, 2, 2)[0] == pytest.approx(expected, abs=1e-11)


def _batch_norm(rank, world):
    blocks, optimizer, data = made(norm=True)
    pipe = Pipeline(blocks, optimizer, stages=2, micro_batches=2)
    train(piped(pipe), optimizer, data, ranges([8], 2))
    before = checksum([b for b in blocks.model.buffers() if b.numel()])
    assert pipe.costs.of(changes_shape=True)[1]
    set_frozen(blocks, 3)
    pipe.reshape(stages=2)
    assert [pipe.costs.of(changes_shape=shape)[1] for shape in (False, True)] == [False, True], "one is assumed still"
    pipe.reshape(stages=1)
    assert not pipe.costs.of(changes_shape=True)[1]
    pipe.close()
    return before


def test_replicas_have_the_same_batch_statistics():
    sums = run_ranks(_batch_norm, 4)
    assert sums[:2] == sums[2:]


def _dropout(rank, world):
    blocks, optimizer, data = made(dropout=0.5)
    pipe, freezer = Pipeline(blocks, optimizer, stages=2), Freezer(blocks, "schedule(alpha=0.5)")
    freezer.end_epoch()
    blocks.model.train()
    modes = {}
    for number, block in enumerate(blocks.model.blocks):
        block.dropout.register_forward_hook(lambda m, _, out, n=number: modes.setdefault(n, m.training))
    train(piped(pipe), optimizer, data, ranges([8], 1))
    pipe.close()
    return modes, [block.dropout.training for block in blocks.model.blocks]


def test_a_frozen_prefix_runs_in_evaluation_mode_also_after_train():
    modes = {}
    for found, after in run_ranks(_dropout, 2):
        modes |= found
        assert all(after), "the mode that the loop set stays"
    assert modes == {0: False, 1: False, 2: False, 3: True, 4: True}


def _cached(rank, world):
    blocks, optimizer, data = made(depth=3)
    layers = [sublayer.module for sublayer in blocks.cut()]
    cache = shared_cache(layers, samples=100, ram=1_000_000, must_pay=False, check=0.0)
    pipe = Pipeline(blocks, optimizer, stages=1, prefix=cache)
    start = [pipe.state_dict()]
    dist.broadcast_object_list(start)
    train(piped(pipe), optimizer, data, ranges([8], 1))
    set_frozen(blocks, 2)
    train(piped(pipe), optimizer, data, ranges([8], 1))
    names = [name for name, p in blocks.model.named_parameters() if not p.requires_grad]
    pipe.load_state_dict({**start[0], "frozen": names})
    losses = train(piped(pipe), optimizer, data, CACHED)
    hits = cache.stats.hits
    pipe.close()
    cache.close()
    return losses, hits


CACHED = [range(10, 13), range(4), range(4)]


def test_a_cache_keeps_no_padding_and_no_activations_of_other_weights():
    """In the first batch one rank of four has no sample; its padding must not become the entry of sample 1."""
    results = run_ranks(_cached, 4)
    blocks, optimizer, data = made(depth=3)
    set_frozen(blocks, 2)
    expected = train(plain(blocks.model), optimizer, data, CACHED)
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=1e-11)
    assert sum(hits for _, hits in results) == 4, "the last batch was read"


def _guarded(rank, world):
    blocks, optimizer, data = made(depth=6)
    pipe, freezer = Pipeline(blocks, optimizer, stages=4), Freezer(blocks, "schedule(alpha=0.9)")
    shapes = []
    for held_out_loss in (1.0, 2.0):  # freezes six blocks, then all of them train again
        train(piped(pipe), optimizer, data, ranges([8], 1))
        freezer.end_epoch(held_out_loss)
        offer = pipe.reshape_if_it_pays(steps_left=10**9, step_s=1.0)
        shapes.append((freezer.frozen, str(pipe.shape), str(offer).split(":")[0]))
    train(piped(pipe), optimizer, data, ranges([8], 1))
    pipe.reshape(stages=2)  # the user says that ranks can hold this
    shapes.append(pipe.offer(steps_left=10**9, step_s=1.0))
    pipe.close()
    return shapes


def test_blocks_that_train_again_get_their_stages_back():
    shapes = run_ranks(_guarded, 4)[0]
    assert shapes == [
        (6, "1x4", "reshape 4x1 -> 1x4 pays"),
        (0, "4x1", "reshape 1x4 -> 4x1 is needed"),
        None,
    ]


def mean_residuals(pipe, width):
    """The mean of the residuals over the ranks that have one, by name."""
    state, means = pipe.sync.state_dict(), {}
    for name, _ in pipe.blocks.model.named_parameters():
        error = state.get(f"{name}.error")
        both = torch.zeros(1 + width * (width if "weight" in name else 1), dtype=torch.float64)
        if error is not None:
            both = torch.cat([torch.ones(1, dtype=torch.float64), error.double().flatten()])
        dist.all_reduce(both)
        means[name] = both[1:] / both[0]
    return means


def _residuals(rank, world, codec, shapes, tied):
    blocks, optimizer, data = made(width=16, depth=6, tied=tied)
    pipe, worst = Pipeline(blocks, optimizer, stages=shapes[0], compress=codec, tune=False), 0.0
    for stages in shapes[1:]:
        train(piped(pipe), optimizer, data, ranges([12], 3))
        before = mean_residuals(pipe, 16)
        pipe.reshape(stages=stages)
        after = mean_residuals(pipe, 16)
        assert any(bool(mean.any()) for mean in before.values())
        worst = max(worst, *(float((before[name] - after[name]).abs().max()) for name in before))
    train(piped(pipe), optimizer, data, ranges([12], 3))
    pipe.sync.wait()
    value = checksum([p for p in blocks.model.parameters() if p.numel()])
    pipe.close()
    return worst, value


@pytest.mark.parametrize(
    ("ranks", "codec", "shapes", "tied"),
    [(4, "powersgd(rank=2)", (2, 1, 2), True), (6, "topk(ratio=0.1)", (3, 2, 1), False)],
)
def test_the_mean_of_residuals_survives_any_reshape(ranks, codec, shapes, tied):
    """Of tied weights, which one stage owns, and where the new replicas are no multiple of the old ones."""
    results = run_ranks(_residuals, ranks, codec, shapes, tied)
    assert max(worst for worst, _ in results) < 1e-7
    assert len({value for _, value in results}) == shapes[-1], "replicas are equal"


def _refused(rank, world):
    blocks, optimizer, data = made(depth=3)
    pipe = Pipeline(blocks, optimizer, stages=2)
    blocks.model.requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        train(piped(pipe), optimizer, data, ranges([8], 1))
    blocks.model.requires_grad_(True)
    train(piped(pipe), optimizer, data, ranges([8], 1))
    if rank == 1:  # in replica 0
        with torch.no_grad():
            blocks.model.blocks[-1].linear.bias.add_(1e-3)
    with pytest.raises(PeerError, match="rank 2 has other values of 'blocks"):
        pipe.reshape(stages=1)


def test_a_model_without_a_training_parameter_and_unequal_replicas_are_named():
    assert len(run_ranks(_refused, 4)) == 4


class _IgnoresTheMask(nn.Module):
    def forward(self, x, mask):
        return 2 * x


def test_a_received_value_that_a_stage_does_not_use_gets_a_zero_gradient():
    # As torch 2.11 receives them: every float wants a gradient, and has to send one back.
    stage = StageModule([Sublayer(0, _IgnoresTheMask())], frozen=0, first=False, prefix=None)
    x, mask = torch.ones(3, 4, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    stage(x, mask).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))
    assert torch.equal(mask.grad, torch.zeros(3, 1))
