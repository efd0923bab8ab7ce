"""Blocks of a model: sublayers that compose to its forward pass, the parameters of each block, and models found."""

import pytest
import torch
from torch import nn

from syncline.errors import UsageError
from syncline.pipeline.blocks import ADAPTERS, Blocks, Split
from syncline.train.workload import build

# model spec: (blocks, sublayers)
MODELS = {
    "vit(size=tiny)": (4, 11),
    "bert(size=tiny)": (2, 6),
    "bert(size=tiny, head=qa, layers=3)": (3, 8),
    "transformer(size=tiny, task=lm)": (2, 7),
    "gpt2(size=tiny)": (2, 7),
}


def model_and_batch(spec):
    work = build(spec)
    return work.phases[0].module, work.train.batch(torch.arange(6))


@pytest.mark.parametrize("spec", MODELS)
def test_the_sublayers_compose_to_the_models_forward_pass(spec):
    torch.manual_seed(0)
    model, batch = model_and_batch(spec)
    blocks = Blocks.of(model)
    assert (len(blocks), len(blocks.cut())) == MODELS[spec]
    inputs, targets = batch[: blocks.inputs], batch[blocks.inputs :]
    loss = blocks.loss(blocks.forward(*inputs), *targets)
    assert torch.equal(loss, model(*batch))
    loss.backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(*batch).backward()
    for name, p in model.named_parameters():
        assert torch.equal(mine[name], p.grad), name
    with torch.no_grad():
        assert [float(n) for n in blocks.correct(blocks.forward(*inputs), *targets)] == [
            float(n) for n in model.correct(*batch)
        ]


@pytest.mark.parametrize("spec", MODELS)
def test_every_parameter_is_before_in_or_after_the_blocks(spec):
    model, _ = model_and_batch(spec)
    blocks = Blocks.of(model)
    parts = [blocks.names(n) for n in range(-1, len(blocks))]
    assert len({name for part in parts for name in part}) == sum(map(len, parts)), "no parameter is in two parts"
    assert len({tuple(p.shape for p in blocks.parameters(n)) for n in range(len(blocks))}) == 1, "equal blocks"
    for part in parts[:2]:
        for name in part:
            model.get_parameter(name).requires_grad_(False)
    assert blocks.frozen() == 1


class Plain(nn.Module):
    """A model whose forward pass nobody described."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Module()
        self.inner.norm = nn.LayerNorm(4)
        self.inner.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)


def test_any_model_with_a_list_of_blocks_can_freeze_but_not_every_one_can_be_cut():
    for blocks in (Blocks.of(Plain()), Blocks.of(Plain(), "inner.layers")):
        assert len(blocks) == 3
        assert blocks.names(0) == ["inner.layers.0.weight", "inner.layers.0.bias"]
        assert blocks.names(-1) == ["embedding.weight", "inner.norm.weight", "inner.norm.bias"]
        with pytest.raises(UsageError, match=r"give it a method split\(\)"):
            blocks.cut()
    with pytest.raises(UsageError, match=r"name a list of blocks \(inner.layers\)"):
        Blocks.of(Plain(), "inner.blocks")
    with pytest.raises(UsageError, match="no list of equal blocks"):
        Blocks.of(nn.Linear(2, 2))


def test_an_adapter_splits_a_class_of_another_package():
    class Foreign(Plain):
        pass

    @ADAPTERS.register("Foreign")
    def foreign(model):
        return Split([model.embedding, model.inner.norm], [[layer] for layer in model.inner.layers], [model.head])

    blocks = Blocks.of(Foreign())
    assert blocks.forward(torch.tensor([1, 2])).shape == (2, 2)

    class Forgetful(Foreign):
        def split(self):
            return Split([self.embedding], [[layer] for layer in self.inner.layers], [self.head])

    with pytest.raises(UsageError, match=r"leaves out parameter 'inner.norm.weight'"):
        Blocks.of(Forgetful())


def test_a_plain_sequence_is_cut_at_its_longest_repeated_pattern():
    linear = [nn.Linear(2, 2) for _ in range(3)]
    blocks = Blocks.of(
        nn.Sequential(nn.Embedding(4, 2), *(m for layer in linear for m in (layer, nn.ReLU())), nn.Tanh())
    )
    assert (len(blocks), len(blocks.members[0]), len(blocks.before), len(blocks.sublayers)) == (3, 2, 1, 8)
    nested = Blocks.of(nn.Sequential(nn.Embedding(4, 2), nn.Sequential(*linear), nn.Tanh()))
    assert (len(nested), len(nested.sublayers)) == (3, 5)
