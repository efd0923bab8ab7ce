"""Freeze policies against PipeTransformer's tables, and a frozen run of an attached model against the plain loop."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline
from ranks import run_ranks
from syncline.errors import UsageError
from syncline.pipeline.freeze_policies import Freezer, Progress, gradient_norms, gradnorm, schedule

TABLES = {
    1 / 5: [0, 3, 5, 6, 8, 9, 9, 10, 10, 11],
    1 / 4: [0, 3, 6, 7, 9, 10, 10, 11, 11, 12],
    1 / 3: [0, 4, 7, 9, 10, 11, 11, 12],
    1 / 2: [0, 6, 9, 11, 12],
}


@pytest.mark.parametrize("alpha", TABLES)
def test_the_schedule_is_pipetransformers(alpha):
    assert [schedule(Progress(t, 12, 0), alpha=alpha) for t in range(len(TABLES[alpha]))] == TABLES[alpha]


def test_gradnorm_freezes_up_to_the_smallest_norm_and_never_past_the_schedule():
    def frozen(norms, epoch=1, before=0):
        return gradnorm(Progress(epoch, 12, before, norms), alpha=1 / 3)

    falling = [float(12 - n) for n in range(12)]
    assert frozen(falling) == 4, "the schedule's bound"
    assert frozen([3, 1, *([5] * 10)]) == 1
    assert frozen([0, *falling[1:]], epoch=3) == 0
    assert frozen([0, 0, 4, 1, *([5] * 8)], epoch=3, before=2) == 3, "frozen blocks have no gradient"


def test_a_freezer_freezes_from_the_input_and_its_state_is_plain_data():
    blocks, embedding = [nn.Linear(2, 2) for _ in range(6)], nn.Embedding(4, 2)
    freezer = Freezer(blocks, "schedule(alpha=0.5)", before=[embedding])
    assert [freezer.end_epoch() for _ in range(3)] == [3, 5, 6]
    assert not any(p.requires_grad for module in (*blocks, embedding) for p in module.parameters())
    other = Freezer(blocks, "schedule(alpha=0.5)", before=[embedding])
    other.load_state_dict({**freezer.state_dict(), "epoch": 1, "frozen": 3})
    assert [all(p.requires_grad for p in b.parameters()) for b in blocks] == [False] * 3 + [True] * 3
    assert not embedding.weight.requires_grad
    assert other.end_epoch() == 5
    assert Freezer(blocks, "none").end_epoch() == 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [("schedul", "did you mean 'schedule'"), ("schedule(alpha=2)", "alpha is 2"), ("schedule(a=1)", "takes")],
)
def test_wrong_policies_are_usage_errors(policy, message):
    with pytest.raises(UsageError, match=message):
        Freezer([nn.Linear(1, 1)], policy)


def test_gradnorm_without_gradients_says_what_to_do():
    freezer = Freezer([nn.Linear(1, 1)], "gradnorm")
    with pytest.raises(UsageError, match="before zero_grad"):
        freezer.end_epoch()
    with pytest.raises(UsageError, match="no blocks"):
        Freezer([])


def _train(rank, world, attached):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = syncline.attach(model, optimizer, tune=False) if attached else None
    freezer = Freezer(list(model)[:4], "gradnorm(alpha=0.5)")
    losses, frozen, units = [], [], []
    for step in range(12):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if sync is None:
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= world
        norms = gradient_norms(list(model)[:4]) if step % 3 == 2 else None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if norms is not None:
            frozen.append(freezer.end_epoch(norms))
        if sync is not None:
            units.append(sum(len(unit.slots) for unit in sync.units))
    if sync is not None:
        sync.close()
    return losses, frozen, units, [p.tolist() for p in model.parameters()]


def test_an_attached_model_freezes_like_the_plain_loop_and_sends_less():
    plain, attached = (run_ranks(_train, 2, way) for way in (False, True))
    for (losses, frozen, _, parameters), (same, also, units, trained) in zip(plain, attached, strict=True):
        assert same == losses
        assert also == frozen
        assert 0 < frozen[-1] < 5
        assert units[-1] == len(parameters) - 2 * frozen[-2], "frozen parameters have left the plan"
        assert trained == parameters
