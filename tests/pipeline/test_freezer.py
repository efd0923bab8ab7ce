"""`Freezer` on a model: what is frozen, evaluation mode, optimizer state, epochs by steps, measurements, resuming."""

import copy

import pytest
import torch
from torch import nn

from syncline.errors import UsageError
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.freeze import Freezer, Measured, advance
from syncline.pipeline.freeze.measure import gradient_norms
from syncline.trace import Recorder
from syncline.train.workload import build


class Block(nn.Module):
    """A block with dropout and BatchNorm."""

    def __init__(self, width=8):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    """An embedding, six blocks and a head."""

    def __init__(self, blocks=6):
        super().__init__()
        self.embedding = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithTokens(Net):
    """Parameters of the model itself: two in front of the blocks, one behind them."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.embedding(x) + self.token * self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def test_bare_parameters_in_front_of_the_blocks_freeze_with_them():
    torch.manual_seed(0)
    model, seen = WithTokens(), []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    freezer = Freezer(model, "schedule(alpha=0.5, blocks=layers)")
    step(model, optimizer)
    freezer.end_epoch()
    step(model, optimizer)
    assert seen == [True, False], "no gradient crosses the frozen blocks"
    assert [p.requires_grad for p in (model.token, model.positions, model.scale)] == [False, False, True]
    state = freezer.state_dict()
    model, seen[:] = WithTokens(), []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    resumed = Freezer(model, "schedule(alpha=0.5, blocks=layers)")
    resumed.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    assert seen == [True, False], "found in the first forward after a resume, frozen in the second"
    assert resumed.blocks.frozen() == resumed.frozen


def step(model, optimizer, seed=0):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def trains(model):
    return [all(p.requires_grad for p in layer.parameters()) for layer in model.layers]


def test_frozen_blocks_are_fixed_and_the_optimizer_is_not_touched():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    freezer = Freezer(model, "schedule(alpha=0.5)")
    for seed in range(3):
        step(model, optimizer, seed)
    assert freezer.end_epoch() == 3
    assert trains(model) == [False] * 3 + [True] * 3
    assert not model.embedding.weight.requires_grad
    before = {name: t.clone() for name, t in model.state_dict().items()}
    states = {id(p): optimizer.state[p]["exp_avg"].clone() for p in model.embedding.parameters()}
    for seed in range(3, 6):
        model.train()
        step(model, optimizer, seed)
    for name, now in model.state_dict().items():
        fixed = name.startswith(("embedding.", "layers.0.", "layers.1.", "layers.2."))
        assert torch.equal(now, before[name]) == fixed, name
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == groups
    assert all(torch.equal(optimizer.state[p]["exp_avg"], states[id(p)]) for p in model.embedding.parameters())
    assert [layer.training for layer in model.layers] == [False] * 3 + [True] * 3
    assert [freezer.end_epoch() for _ in range(2)] == [5, 6]
    with torch.no_grad():
        x = torch.randn(16, 4)
        outputs = [model.layers[0](model.embedding(x)) for _ in range(2)]
    assert torch.equal(*outputs), "dropout is off"


def test_frozen_embeddings_of_bert_have_no_dropout():
    workload = build("bert(size=small, layers=2)", "synthetic(samples=4)", seed=0)
    blocks = Blocks.of(workload.phases[0].module)
    inputs = workload.train.batch(torch.arange(4))[: blocks.inputs]
    freezer = Freezer(blocks, "schedule(alpha=0.5)")

    def embedded():
        return blocks.cut()[0].module(*inputs)[0]

    assert not torch.equal(embedded(), embedded()), "dropout"
    freezer.end_epoch()
    assert torch.equal(embedded(), embedded())
    freezer.close()


def test_the_guard_makes_blocks_train_again():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    freezer = Freezer(model, "schedule(alpha=0.5)")
    assert [freezer.end_epoch(held_out_loss=loss) for loss in (1.0, 0.9, 2.0)] == [3, 5, 3]
    assert trains(model) == [False] * 3 + [True] * 3
    step(model, optimizer)
    assert [layer.training for layer in model.layers] == [False] * 3 + [True] * 3
    assert model.layers[3].linear.weight.grad is not None


def test_epochs_are_counted_in_steps_of_the_optimizer():
    model, recorder = Net(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    freezer = Freezer(model, "schedule(alpha=0.5, every=3)", optimizers=[optimizer], recorder=recorder)
    frozen = []
    for seed in range(8):
        recorder.step = seed
        step(model, optimizer, seed)
        with torch.no_grad():
            model(torch.randn(2, 4))  # another pass without gradients decides nothing
        frozen.append(freezer.frozen)
    assert frozen == [0, 0, 0, 3, 3, 3, 5, 5]
    assert [(s.name, s.lane, s.unit, s.step) for s in recorder.spans()] == [
        ("freeze", "between", "3 of 6 blocks", 3),
        ("freeze", "between", "5 of 6 blocks", 6),
    ]
    freezer.close()
    for seed in range(4):
        step(model, optimizer, seed)
    assert freezer.frozen == 5


def test_gradient_norms_are_measured_while_it_trains():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    freezer = Freezer(model, "gradnorm(alpha=0.5, every=2)", optimizers=[optimizer])
    plain, rows = copy.deepcopy(model), []
    for seed in range(2):
        torch.manual_seed(seed)
        step(model, optimizer, seed)
        torch.manual_seed(seed)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        plain.zero_grad()
        (plain(x) - x.sum(1, keepdim=True)).square().mean().backward()
        rows.append(gradient_norms(Blocks.of(plain)))
    expected = [((a * a + b * b) / 2) ** 0.5 for a, b in zip(*rows, strict=True)]
    asked = advance(freezer.state, Measured(norms=expected)).frozen
    step(model, optimizer)
    assert freezer.frozen == asked == min(3, expected.index(min(expected)))


def test_plasticity_freezes_blocks_that_stopped_and_keeps_the_others():
    torch.manual_seed(0)
    model = Net(blocks=3)
    freezer = Freezer(model, "plasticity(tolerance=0.3, patience=1)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(model, optimizer)
    moves = [(0.5, 0.5, 0.5), (0.4, 0.4, 0.4), (0.0, 0.0, 2.0)]
    frozen = []
    for sizes in moves:
        with torch.no_grad():
            for layer, size in zip(model.layers, sizes, strict=True):
                layer.linear.weight += size * torch.randn(8, 8)
        frozen.append(freezer.end_epoch())
    assert frozen == [0, 0, 2]
    assert [layer.training for layer in model.layers] == [False, False, True], "the probe leaves the modes as they were"


@pytest.mark.parametrize("policy", ["schedule(alpha=0.5)", "gradnorm(alpha=0.5, every=4)", "plasticity(patience=1)"])
def test_a_saved_freezer_continues_as_if_never_stopped(policy):
    def train(freezer, model, optimizer, seeds):
        frozen = []
        for seed in seeds:
            torch.manual_seed(seed)
            step(model, optimizer, seed)
            if seed % 4 == 3 and "every" not in policy:
                freezer.end_epoch(held_out_loss=1.0 / (seed + 1))
            frozen.append(freezer.frozen)
        return frozen

    def make():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        return Freezer(model, policy, optimizers=[optimizer]), model, optimizer

    whole = make()
    expected = train(*whole, range(24))
    first = make()
    got = train(*first, range(10))
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict(), first[2].state_dict()))
    second = make()
    second[1].load_state_dict(saved[1])
    second[2].load_state_dict(saved[2])
    second[0].load_state_dict(saved[0])
    got += train(*second, range(10, 24))
    assert got == expected
    assert expected[-1] > 0
    assert second[0].state == whole[0].state
    assert all(torch.equal(a, b) for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True))


def test_a_state_of_another_model_is_refused():
    saved = Freezer(Net(blocks=4), "schedule").state_dict()
    with pytest.raises(UsageError, match="4 blocks, this one has 6"):
        Freezer(Net(), "schedule").load_state_dict(saved)
    with pytest.raises(UsageError, match="not the state of a freezer"):
        Freezer(Net(), "schedule").load_state_dict({"state": torch.zeros(3, dtype=torch.uint8)})


def test_what_counts_steps_needs_the_optimizer():
    for policy in ("schedule(every=4)", "gradnorm"):
        with pytest.raises(UsageError, match="give the optimizer"):
            Freezer(Net(), policy)


def test_copies_of_the_model_have_no_hook_that_freezes():
    model = Net()
    freezer = Freezer(model, "schedule(alpha=0.5)")
    freezer.end_epoch()
    twin = copy.deepcopy(model)
    twin.train()
    twin(torch.randn(4, 4))
    assert all(layer.training for layer in twin.layers)


class _Heard:
    """The peers of several freezers that run one after the other: each hears those before it."""

    def __init__(self):
        self.measured = []

    def gather(self, values):
        if not values.is_floating_point():
            return torch.stack([values])
        self.measured.append(values)
        return torch.stack(self.measured)

    def text_of_rank_0(self, text):
        return text


def test_the_gradient_norm_of_a_block_in_two_stages_is_that_of_the_whole_block():
    peers = _Heard()
    for norms in ([4.0, 5.5], [3.0, 0.0]):  # of each rank's part of both blocks: 5 and 5.5 in total
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        freezer = Freezer(model, "gradnorm(alpha=0.9)", optimizers=[optimizer], peers=peers)
        for layer, norm in zip(model, norms, strict=True):
            layer.bias.grad = torch.tensor([norm, 0.0])
        optimizer.step()
        frozen = freezer.end_epoch()
    assert frozen == 0, "block 0 has the smallest norm"
