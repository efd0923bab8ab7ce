"""`attach(..., freeze=...)`: the update of the plain loop, less on the network, and the same decision on every rank."""

import pytest
import torch
import torch.distributed as dist
from test_freezer import Net
from torch import nn

import syncline
from ranks import run_ranks
from syncline.errors import UsageError
from syncline.pipeline.freeze import Freezer
from syncline.trace import Recorder

POLICIES = ["schedule(alpha=0.3, every=3)", "gradnorm(alpha=0.5, every=3)"]
WAYS = {"reducer": {}, "overlap": {"tune": False}, "compressed": {"tune": False, "compress": "powersgd(rank=2) | bf16"}}


def _model():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
    return nn.Sequential(
        nn.Linear(16, 16), nn.ModuleDict({"layers": nn.Sequential(*blocks)})["layers"], nn.Linear(16, 1)
    )


def _train(rank, world, model, optimizer, average=lambda: None):
    losses = []
    for step in range(12):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        average()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _plain(rank, world, policy):
    """The plain loop: all-reduce, and the same freezer without an engine."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    freezer = Freezer(model, policy.replace("(", "(blocks='1', ", 1), optimizers=[optimizer])

    def average():
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world

    losses = _train(rank, world, model, optimizer, average)
    return losses, freezer.frozen, [p.tolist() for p in model.parameters()]


def _attached(rank, world, policy, options):
    model, recorder = _model(), Recorder(rank=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    freeze = policy.replace("(", "(blocks='1', ", 1)
    sync = syncline.attach(model, optimizer, freeze=freeze, recorder=recorder, **options)
    count = {"step": 0}

    def next_step():
        recorder.step = count["step"] = count["step"] + 1

    losses = _train(rank, world, model, optimizer, next_step)
    sync.wait()
    trained = {slot.name for unit in sync.units for slot in unit.slots}
    frozen = sync.freeze.frozen
    sync.close()
    sent = {}
    for span in recorder.spans():
        if span.lane == "exchange":
            sent[span.step] = sent.get(span.step, 0) + span.bytes
    freezes = [(s.unit, s.lane) for s in recorder.spans() if s.name == "freeze"]
    return losses, frozen, [p.tolist() for p in model.parameters()], trained, sent, freezes


def _all_ways(rank, world):
    return {
        policy: (_plain(rank, world, policy), {name: _attached(rank, world, policy, way) for name, way in WAYS.items()})
        for policy in POLICIES
    }


def test_an_attached_model_freezes_like_the_plain_loop_and_sends_less():
    names = [name for name, _ in _model().named_parameters()]
    for found in run_ranks(_all_ways, 2):
        for policy, (plain, attached) in found.items():
            losses, frozen, parameters = plain
            assert 0 < frozen < 5, policy
            for way, (same, also, trained, live, sent, freezes) in attached.items():
                assert also == frozen, (policy, way)
                gone = {n for n in names if n.startswith("0.") or n.startswith(tuple(f"1.{b}." for b in range(frozen)))}
                assert live == set(names) - gone, "frozen parameters have left the units"
                steps = sorted(sent)
                assert sent[steps[-1]] < 0.8 * sent[steps[0]], (policy, way, sent)
                assert freezes[-1] == (f"{frozen} of 4 blocks", "between")
                if way != "compressed":
                    assert same == pytest.approx(losses, rel=1e-5), (policy, way)
                    for a, b in zip(trained, parameters, strict=True):
                        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-6)


def drawn(progress):
    """A policy that differs between ranks."""
    return int(torch.randint(1, 5, ()))


def failing(progress):
    """A policy that fails after the first epoch, on rank 0."""
    if progress.epoch > 0 and dist.get_rank() == 0:
        raise RuntimeError("no idea")
    return 0


def _decide(rank, world):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = {}
    sync = syncline.attach(model, optimizer, freeze="schedule(alpha=0.5, guard=0.1)")
    # The ranks' means: 1.0, 0.9 and 1.0. Rank 1 alone would not see that the last one is worse.
    losses = [(0.9, 1.1), (0.8, 1.0), (1.2, 0.8)]
    said["guard"] = [sync.freeze.end_epoch(held_out_loss=pair[rank]) for pair in losses]
    sync.close()
    torch.manual_seed(rank)
    sync = syncline.attach(model, optimizer, freeze="test_attach_freeze:drawn")
    said["drawn"] = [sync.freeze.end_epoch() for _ in range(4)]
    sync.close()
    for policy, given in (("test_attach_freeze:failing", None), ("schedule", 1.0 if rank else None)):
        sync = syncline.attach(model, optimizer, freeze=policy)
        try:
            sync.freeze.end_epoch(held_out_loss=given)
        except Exception as error:
            said[policy] = f"{type(error).__name__}: {error}"
        sync.close()
    return said


def test_all_ranks_take_the_same_decision_or_all_get_the_error():
    first, second = run_ranks(_decide, 2)
    assert first["guard"] == second["guard"] == [3, 5, 3]
    assert first["drawn"] == second["drawn"]
    assert first["test_attach_freeze:failing"] == "RuntimeError: no idea"
    assert (
        second["test_attach_freeze:failing"] == "UsageError: the freeze policy of rank 0 failed: RuntimeError: no idea"
    )
    for said in (first, second):
        assert "with a held-out loss on all of them or on none" in said["schedule"]


def _alone(rank, world):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="did you mean 'schedule'"):
        syncline.attach(model, optimizer, freeze="shedule")
    with pytest.raises(UsageError, match="name a list of blocks"):
        syncline.attach(model, optimizer, freeze="schedule(blocks=encoder)")
    sync = syncline.attach(model, optimizer, freeze="schedule(alpha=0.5, every=1)")
    for _ in range(2):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = sync.freeze.state_dict()
    sync.close()
    frozen = [not layer.linear.weight.requires_grad for layer in model.layers]
    model(torch.randn(4, 4))
    return frozen, sync.freeze.frozen, saved["state"].dtype


def test_one_rank_freezes_too_and_a_wrong_policy_attaches_nothing():
    assert run_ranks(_alone, 1) == [([True] * 3 + [False] * 3, 3, torch.uint8)]
