"""Residuals are committed by the step that uses the gradients: optimizers, SAM, updates by hand, skipped steps."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import syncline
from ranks import run_ranks
from syncline import codecs

STEPS, LR, CODEC = 6, 0.1, "topk(0.1)"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))


def loss(net: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    numbers = torch.Generator().manual_seed(31 * step + rank)
    x, y = torch.randn(8, 16, generator=numbers), torch.randn(8, 4, generator=numbers)
    return F.mse_loss(net(x), y)


def attached(optimizer: str | None = "sgd") -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    net = model()
    made = torch.optim.SGD(net.parameters(), lr=LR)
    return net, made, syncline.attach(net, made if optimizer else None, compress=CODEC, tune=False)


def with_optimizer(rank: int) -> Any:
    net, optimizer, sync = attached()
    for step in range(STEPS):
        loss(net, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, sync


def by_hand(rank: int) -> Any:
    net, _, sync = attached(None)
    for step in range(STEPS):
        loss(net, step, rank).backward()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(p.grad, alpha=-LR)
                p.grad = None
    return net, sync


def by_hand_through_data(rank: int) -> Any:
    """As in old tutorials; the optimizer is there for its `zero_grad` only."""
    net, optimizer, sync = attached()
    for step in range(STEPS):
        loss(net, step, rank).backward()
        for p in net.parameters():
            p.data.add_(p.grad.data, alpha=-LR)
        optimizer.zero_grad()
    return net, sync


def by_hand_zeroed_in_place(rank: int) -> Any:
    net, _, sync = attached(None)
    for step in range(STEPS):
        loss(net, step, rank).backward()
        for p in net.parameters():
            p.data.add_(p.grad, alpha=-LR)
            p.grad.data.zero_()
    return net, sync


def by_hand_after_wait(rank: int) -> Any:
    net, _, sync = attached(None)
    for step in range(STEPS):
        loss(net, step, rank).backward()
        sync.wait()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(p.grad, alpha=-LR)
        net.zero_grad()
    return net, sync


def skipped_by(zero: Callable[[nn.Module, torch.optim.Optimizer], None], rank: int) -> Any:
    """Every second pass is skipped after its norm was read; the first pass is one of them."""
    net, optimizer, sync = attached()
    for step in range(STEPS):
        loss(net, 100 + step, rank).backward()
        before = sync.state_dict()
        assert math.isfinite(sum(float(p.grad.norm()) for p in net.parameters()))
        zero(net, optimizer)
        after = sync.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        loss(net, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return net, sync


def skipped_by_optimizer(rank: int) -> Any:
    return skipped_by(lambda net, optimizer: optimizer.zero_grad(), rank)


def skipped_in_place(rank: int) -> Any:
    return skipped_by(lambda net, optimizer: optimizer.zero_grad(set_to_none=False), rank)


def skipped_by_model(rank: int) -> Any:
    return skipped_by(lambda net, optimizer: net.zero_grad(), rank)


def skipped_by_model_in_place(rank: int) -> Any:
    return skipped_by(lambda net, optimizer: net.zero_grad(set_to_none=False), rank)


def skipped_through_data(rank: int) -> Any:
    def zero(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in net.parameters():
            assert p.grad is not None
            p.grad.data.zero_()

    return skipped_by(zero, rank)


def stepped_with_zeros(rank: int, zero: Callable[[Tensor], Tensor]) -> Any:
    """Gradients are zeroed, and the optimizer steps all the same: it changes nothing."""
    net, optimizer, sync = attached()
    for step in range(STEPS):
        loss(net, 100 + step, rank).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad = zero(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        loss(net, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, sync


def stepped_with_zeroed_gradients(rank: int) -> Any:
    return stepped_with_zeros(rank, torch.Tensor.zero_)


def stepped_with_new_zeros(rank: int) -> Any:
    return stepped_with_zeros(rank, lambda grad: torch.zeros(grad.shape))


LOOPS = {
    f.__name__: f
    for f in (
        by_hand, by_hand_through_data, by_hand_zeroed_in_place, by_hand_after_wait, skipped_by_optimizer,
        skipped_in_place, skipped_by_model, skipped_by_model_in_place, skipped_through_data,
        stepped_with_zeroed_gradients, stepped_with_new_zeros,
    )
}  # fmt: skip


def everything(rank: int, world: int) -> dict[str, str]:
    """For every loop, how it differs from the same steps with an optimizer."""
    results = {}
    for name, loop in {"with_optimizer": with_optimizer, **LOOPS}.items():
        net, sync = loop(rank)
        results[name] = {**sync.state_dict(), **{n: p.detach().clone() for n, p in net.named_parameters()}}
        sync.close()
    want = results.pop("with_optimizer")
    assert any(key.endswith(".error") and t.any() for key, t in want.items())
    assert int(want["syncline.step"]) == STEPS
    problems = {}
    for name, got in results.items():
        if name.startswith("stepped"):
            got["syncline.step"] = got["syncline.step"] // 2
        if want.keys() != got.keys():
            problems[name] = f"keys {sorted(set(want) ^ set(got))}"
        elif odd := [key for key in want if not torch.equal(want[key], got[key])]:
            problems[name] = f"values of {odd}"
    return problems


@pytest.fixture(scope="module")
def problems() -> list[dict[str, str]]:
    return run_ranks(everything, 2)


@pytest.mark.parametrize("loop", LOOPS)
def test_state_is_that_of_steps_with_an_optimizer(loop: str, problems: list[dict[str, str]]) -> None:
    assert [p.get(loop) for p in problems] == [None, None]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is usually written, around a base optimizer."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        super().__init__(parameters, dict(rho=0.05, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        scale = 0.05 / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise AssertionError("SAM is stepped in two parts")


def sam(rank: int, world: int) -> tuple[list[float], int]:
    net = model()
    optimizer = Sam(net.parameters(), torch.optim.SGD, lr=LR)
    sync = syncline.attach(net, optimizer, compress=CODEC, tune=False)
    norms = []
    for step in range(STEPS):
        loss(net, step, rank).backward()
        optimizer.first_step()
        loss(net, step, rank).backward()
        optimizer.second_step()
        errors = [t for key, t in sync.state_dict().items() if key.endswith(".error")]
        norms.append(float(sum(e.square().sum() for e in errors)))
    values = [float(p.detach().sum()) for p in net.parameters()]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, values)
    assert gathered == [values] * world
    sync.close()
    return norms, sync.step


def test_sam_commits_residuals() -> None:
    for norms, _ in run_ranks(sam, 2):
        assert all(norm > 0 for norm in norms)
        assert len(set(norms)) == len(norms), "another residual after every step"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, which: str) -> Tensor:
        out: Tensor = self.get_submodule(which)(x)
        return out


CODECS = ["topk(0.1)", "int8", "onebit", "powersgd(rank=2)", "acpsgd(rank=2)", "dgc(0.1)", "powersgd(rank=2) | bf16"]


def run_part(net: nn.Module, which: str, step: int, rank: int) -> None:
    numbers = torch.Generator().manual_seed(31 * step + rank)
    net(torch.randn(4, 32, generator=numbers), which).square().mean().backward()


def unused(rank: int, world: int) -> dict[str, str]:
    problems = {}
    for spec in CODECS:
        net = Two()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
        sync = syncline.attach(net, optimizer, compress=spec, tune=False)

        for step in range(3):
            run_part(net, "first", 2 * step, rank)
            optimizer.step()
            optimizer.zero_grad()
            run_part(net, "second", 2 * step + 1, rank)
            optimizer.step()
            optimizer.zero_grad()
        state = {key: t for key, t in sync.state_dict().items() if key.startswith("first.")}
        values = [p.detach().clone() for p in net.first.parameters()]
        for step in range(3):
            run_part(net, "second", 10 + step, rank)
            if not all(p.grad is None for p in net.first.parameters()):
                problems[spec] = "a gradient of a parameter that no rank used"
            optimizer.step()
            optimizer.zero_grad()
        after = {key: t for key, t in sync.state_dict().items() if key.startswith("first.")}
        if not any(key.endswith(".error") and t.any() for key, t in state.items()):
            problems[spec] = "no residual"
        if odd := [key for key in state if not torch.equal(state[key], after[key])]:
            problems[spec] = f"{odd} changed"
        if any(not torch.equal(p, v) for p, v in zip(net.first.parameters(), values, strict=True)):
            problems[spec] = "a parameter that no rank used was stepped"
        sync.close()
    return problems


def test_a_parameter_that_no_rank_used_keeps_its_residual_and_gets_no_gradient() -> None:
    assert all(codecs.build(spec).feedback for spec in CODECS)
    assert run_ranks(unused, 2) == [{}, {}]
