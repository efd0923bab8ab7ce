"""Training loops as people write them: each is run with torch DDP and with `syncline.attach`, by the same code.

A case is a function of a `Run`: it builds model and optimizer, attaches, trains, and shows what it read on the way
(`run.read`). What is compared: losses, everything read, final parameters, buffers, optimizer state.
"""

import contextlib
import copy
import gc
import io
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import slow_exchange
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel

import syncline
from syncline import plan

STEPS = 20
CASE_SECONDS = 20
HANGS = 3
DEVICE = ["cpu"]
"""Where models and batches are; `test_engine_gpu.py` sets it in its ranks."""
NORMS = ("clip_grad_norm", "grad_scaler_and_clipping")
"""On CUDA a norm is summed by the alignment of its memory, which is another one here: to rounding."""
SLOW = "slow_exchange:slow(ms=1.5)"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, lr=0.05, **more: SGD(p, lr=lr, momentum=0.9, **{"weight_decay": 1e-3, **more}),
    "adamw": lambda p, lr=5e-3, **more: AdamW(p, lr=lr, **{"weight_decay": 0.1, **more}),
    "sgd_plain": lambda p: SGD(p, lr=0.05),
    "sgd_nesterov": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd_foreach": lambda p: SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: Adam(p, lr=5e-3, weight_decay=1e-3),
    "adamw_foreach": lambda p: AdamW(p, lr=5e-3, foreach=True),
    "adamw_fused": lambda p: AdamW(p, lr=5e-3, fused=True),
    "adamw_amsgrad": lambda p: AdamW(p, lr=5e-3, amsgrad=True),
}
BOTH = ("sgd", "adamw")


# -- the two ways ------------------------------------------------------------------------------------------------


class Ddp:
    """The reference: torch's DistributedDataParallel."""

    def __init__(self, group: dist.ProcessGroup, exchange: str | None = None) -> None:
        self.group = group
        self.nets: dict[int, tuple[DistributedDataParallel, bool]] = {}

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool) -> nn.Module:
        net = DistributedDataParallel(model, process_group=self.group, find_unused_parameters=unused)
        self.nets[id(model)] = net, unused
        return net

    def again(self, model: nn.Module) -> nn.Module:
        """DDP does not follow `requires_grad`: a new one is needed, after the old one has let go of the parameters."""
        unused = self.nets.pop(id(model))[1]
        gc.collect()
        return self.attach(model, (), unused)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.nets[id(model)][0].no_sync()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.nets.clear()


class Ours:
    """`syncline.attach` over a slow exchange; with 2 and 3 ranks every module is a unit, and large ones are cut."""

    attached = 0

    def __init__(self, group: dist.ProcessGroup, exchange: str | None = None) -> None:
        self.cut = dist.get_world_size(group) in (2, 3)
        self.group, self.exchange = group, exchange
        self.syncs: dict[int, Any] = {}
        self.launched = slow_exchange.launched[0]

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool) -> nn.Module:
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        # Tuning measures the machine for a while: every fifth will do, and those of two and three ranks without a plan.
        Ours.attached += 1
        how: dict[str, Any] = {"exchange": self.exchange, "tune": self.cut or Ours.attached % 5 == 0}
        if self.cut and not hasattr(model, "_orig_mod") and all(p.requires_grad for p in model.parameters()):
            how = {"plan": fine_plan(model, self.exchange)}
        self.syncs[id(model)] = syncline.attach(model, optimizer, process_group=self.group, **how)
        return model

    def again(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.syncs[id(model)].no_sync()
        return context

    def wait(self) -> None:
        for sync in self.syncs.values():
            sync.wait()

    def close(self) -> None:
        syncs, self.syncs = list(self.syncs.values()), {}
        for sync in syncs:
            sync.close()
        if self.exchange and syncs and self.group.size() > 1:
            assert slow_exchange.launched[0] > self.launched, "the slow exchange was not used"


def fine_plan(model: nn.Module, exchange: str | None) -> plan.Plan:
    """The default plan would send these small models as one unit."""
    shapes = [plan.Shape(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    return plan.default_plan(shapes, exchange=exchange, group_bytes=0, part_bytes=72 << 10)


@dataclass
class Run:
    """One case in one way on one rank: what its function builds, and what it saw."""

    way: Any
    rank: int
    world: int
    kind: str
    seen: dict[str, list[Tensor]] = field(default_factory=lambda: {"losses": [], "reads": []})
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def optimizer(self, parameters: Any, **more: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](parameters, **more)

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer, unused: bool = False) -> nn.Module:
        """The callable that trains `model`: DDP's wrapper, or the model itself."""
        model.to(DEVICE[0])
        self.models.append(model)
        self.optimizers.extend(optimizers)
        net: nn.Module = self.way.attach(model, optimizers, unused)
        return net

    def batch(self, step: int, micro: int = 0, shape: tuple[int, ...] = (8, 32), targets: int = 10) -> Any:
        """Inputs and targets of this rank: the same numbers in both ways."""
        generator = torch.Generator().manual_seed(1 + step * 1009 + micro * 101 + self.rank * 7)
        x, y = torch.randn(shape, generator=generator), torch.randn(shape[0], targets, generator=generator)
        return x.to(DEVICE[0]), y.to(DEVICE[0])

    def loss(self, net: Callable[..., Tensor], step: int, micro: int = 0, **more: Any) -> Tensor:
        """Forward and loss of one batch, noted."""
        x, y = self.batch(step, micro, **more)
        return self.noted(F.mse_loss(net(x).to(y.dtype), y))

    def noted(self, loss: Tensor) -> Tensor:
        self.seen["losses"].append(loss.detach().clone())
        return loss

    def read(self, *tensors: Tensor) -> None:
        """Show what the case has read at this point."""
        self.seen["reads"].extend(t.detach().clone() for t in tensors)

    def finish(self) -> dict[str, list[Tensor]]:
        """Parameters are read first, without a wait: the last updates may be in flight."""
        seen = self.seen
        seen["parameters"] = [p.detach().clone() for m in self.models for p in m.parameters()]
        self.way.wait()
        # Every rank has buffers of its own after its last forward: rank 0's are the model's.
        seen["buffers"] = [b.clone() for m in self.models for b in m.buffers() if self.rank == 0]
        seen["optimizer"] = [
            t.clone() for o in self.optimizers for t in _tensors(o.state_dict()["state"])
        ]  # fmt: skip
        return seen


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from _tensors(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)


# -- models ------------------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 160), nn.ReLU(), nn.Linear(160, 128), nn.ReLU(), nn.Linear(128, 136), nn.Tanh(),
        nn.Linear(136, 10),
    )  # fmt: skip


def convnet() -> nn.Sequential:
    # No bias before a BatchNorm: its gradient is nothing but rounding, which Adam blows up to full steps.
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, bias=False),
        nn.BatchNorm2d(64), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64 * 4, 10),
    )  # fmt: skip


class Branches(nn.Module):
    """`never` is not used, `some` on odd ranks only, `alternate` in even steps only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.never, self.some, self.alternate = nn.Linear(32, 64), nn.Linear(32, 136), nn.Linear(32, 136)
        self.first, self.last = nn.Linear(32, 136), nn.Linear(136, 10)
        self.rank = rank

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.first(x)
        h = h + self.some(x) if self.rank % 2 else h
        h = h + self.alternate(x) if step % 2 == 0 else h
        out: Tensor = self.last(h.tanh())
        return out


class Tied(nn.Module):
    """One parameter in two modules, and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(32, 136), nn.Linear(136, 136), nn.Linear(136, 136)
        self.twice, self.last = nn.Linear(136, 136), nn.Linear(136, 10)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(self.first(x)).tanh()).tanh()
        out: Tensor = self.last(self.twice(self.twice(h).tanh()))
        return out


class Gpt(nn.Module):
    """A small transformer whose head is the embedding's weight, used by this module's forward."""

    def __init__(self, vocabulary: int = 384, width: int = 48) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Parameter(0.1 * torch.randn(8, width))
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.position
        q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        h = h + self.out(mixed.reshape(h.shape))
        return F.linear(h + self.mlp(h), self.embed.weight) * self.temperature


class NormalizedSgd(torch.optim.Optimizer):
    """A user's own optimizer that needs all gradients at once: steps of one length."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in used]).norm()
            for p in used:
                p.sub_(p.grad / norm, alpha=group["lr"])


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of the table. `core`: also with 1, 3 and 4 ranks. `exact`: to the bit with 1 and 2 ranks.

    `tolerance`: rtol and atol where it is to rounding, if not those of the parameters' precision.
    """

    function: Callable[[Run], None]
    core: bool
    optimizers: tuple[str, ...]
    exact: bool
    tolerance: tuple[float, float] | None


CASES: dict[str, Case] = {}


def case(
    *,
    core: bool = False,
    optimizers: tuple[str, ...] = BOTH,
    exact: bool = True,
    tolerance: tuple[float, float] | None = None,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the table, under its name."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        CASES[function.__name__] = Case(function, core, optimizers, exact, tolerance)
        return function

    return add


def nothing(_step: int) -> None:
    """What a loop does where a case has nothing to do."""


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    net: Callable[..., Tensor],
    *,
    between: Callable[[int], Any] = nothing,
    after: Callable[[int], Any] = nothing,
    **more: Any,
) -> None:
    """The plain loop; `between` runs after backward and before step, `after` right after step."""
    for step in range(STEPS):
        run.loss(net, step, **more).backward()
        between(step)
        optimizer.step()
        after(step)
        optimizer.zero_grad()


def plain(run: Run, make: Callable[[], nn.Module] = mlp) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Model, optimizer and the callable that trains it."""
    model = make()
    optimizer = run.optimizer(model.parameters())
    return model, optimizer, run.attach(model, optimizer)


@case(core=True, optimizers=tuple(OPTIMIZERS))
def plain_mlp(run: Run) -> None:
    train(run, *plain(run))


@case(core=True)
def batchnorm_buffers(run: Run) -> None:
    train(run, *plain(run, convnet), shape=(6, 3, 8, 8))


@case(optimizers=("sgd",))
def channels_last(run: Run) -> None:
    train(run, *plain(run, lambda: convnet().to(memory_format=torch.channels_last)), shape=(6, 3, 8, 8))


@case(core=True)
def accumulation(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(STEPS):
        with run.way.no_sync(model):
            run.loss(net, step, 0).backward()
            run.loss(net, step, 1).backward()
        run.loss(net, step, 2).backward()
        optimizer.step()
        optimizer.zero_grad()


# DDP averages the first mean again together with the second gradient; the mean of the second alone, added to the
# first, is the same but for rounding.
@case(core=True, exact=False)
def accumulation_without_no_sync(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(STEPS):
        run.loss(net, step, 0).backward()
        run.loss(net, step, 1).backward()
        run.read(*(p.grad for p in model.parameters())) if step == 3 else None
        optimizer.step()
        optimizer.zero_grad()


def _branches(run: Run, set_to_none: bool) -> None:
    model = Branches(run.rank)
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    for step in range(STEPS):
        run.loss(lambda x, step=step: net(x, step), step).backward()
        if step % 4 == 3:  # also without anybody looking
            missing = [p.grad is None for p in model.parameters()]
            run.read(torch.tensor(missing))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@case(core=True)
def unused_parameters(run: Run) -> None:
    _branches(run, set_to_none=True)


@case(optimizers=("sgd",))
def unused_parameters_with_zero_gradients(run: Run) -> None:
    _branches(run, set_to_none=False)


@case(core=True)
def tied_weights(run: Run) -> None:
    train(run, *plain(run, Tied))


@case(core=True)
def gpt_tied_head(run: Run) -> None:
    model = Gpt()
    optimizer = run.optimizer(model.parameters(), lr=2e-3)
    net = run.attach(model, optimizer)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * 11 + run.rank)
        tokens = torch.randint(384, (4, 9), generator=generator).to(DEVICE[0])
        logits = net(tokens[:, :-1])
        run.noted(F.cross_entropy(logits.reshape(-1, 384), tokens[:, 1:].reshape(-1))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _gan(run: Run, frozen: bool) -> None:
    maker = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 136), nn.ReLU(), nn.Linear(136, 32))
    critic = nn.Sequential(nn.Linear(32, 136), nn.LeakyReLU(), nn.Linear(136, 128), nn.LeakyReLU(), nn.Linear(128, 1))
    makes, judges = run.optimizer(maker.parameters()), run.optimizer(critic.parameters())
    make, judge = run.attach(maker, makes), run.attach(critic, judges)
    for step in range(STEPS):
        real, noise = run.batch(step)[0], run.batch(step, 1, shape=(8, 16))[0]
        judges.zero_grad()
        fake = make(noise)
        run.noted(F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        judges.step()
        makes.zero_grad()
        critic.requires_grad_(not frozen)
        # DDP wants a backward for each of its forwards: what is frozen is called bare.
        run.noted(F.softplus(-(critic if frozen else judge)(fake)).mean()).backward()
        critic.requires_grad_(True)
        makes.step()


@case(core=True)
def gan(run: Run) -> None:
    _gan(run, frozen=False)


@case(optimizers=("adamw",))
def gan_with_frozen_critic(run: Run) -> None:
    _gan(run, frozen=True)


def _two_optimizers(run: Run, every: int) -> None:
    model = mlp()
    low, high = run.optimizer(model[:3].parameters()), run.optimizer(model[3:].parameters(), lr=0.01)
    net = run.attach(model, low, high)
    for step in range(STEPS):
        run.loss(net, step).backward()
        low.step()
        if step % every == 0:
            high.step()
        model.zero_grad()


@case(optimizers=("sgd",))
def two_optimizers_of_one_model(run: Run) -> None:
    _two_optimizers(run, every=1)


@case(optimizers=("adamw",))
def two_optimizers_of_which_one_steps_rarely(run: Run) -> None:
    _two_optimizers(run, every=3)


@case(core=True, tolerance=(5e-2, 5e-3))
def bf16_parameters(run: Run) -> None:
    model, optimizer, net = plain(run, lambda: mlp().bfloat16())
    train(run, model, optimizer, lambda x: net(x.bfloat16()))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 136), nn.Linear(136, 136).bfloat16(), nn.Linear(136, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x).tanh().bfloat16()).tanh().double())
        return out


@case(optimizers=("sgd",))
def several_dtypes(run: Run) -> None:
    train(run, *plain(run, Mixed))


@case(optimizers=("sgd",))
def autocast(run: Run) -> None:
    model, optimizer, net = plain(run)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x)

    train(run, model, optimizer, cast)


@case(core=True)
def clip_grad_norm(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(_step: int) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        run.read(norm)
        assert norm > 0.05, "the bound does not bite"

    train(run, model, optimizer, net, between=clip)


@case(core=True)
def clip_grad_value(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(step: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        if step == 4:
            assert any((p.grad.abs() == 1e-3).any() for p in model.parameters()), "the bound does not bite"

    train(run, model, optimizer, net, between=clip)


def _scaled(run: Run, clip: bool) -> None:
    model, optimizer, net = plain(run)
    scaler = torch.amp.GradScaler(DEVICE[0], init_scale=2.0**10, growth_interval=4)
    scales = []
    for step in range(STEPS):
        loss = run.loss(net, step)
        if step == 6 and run.rank == run.world - 1:
            loss = loss * float("inf")
        before = model[0].weight.detach().clone()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            run.read(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(before, model[0].weight) == (step == 6), f"step {step} was wrongly skipped or taken"
        optimizer.zero_grad()
    assert scales[6] < scales[5], "no step was skipped"
    run.read(torch.tensor(scales))


@case(core=True, optimizers=(*BOTH, "adamw_fused"))
def grad_scaler_with_a_skipped_step(run: Run) -> None:
    _scaled(run, clip=False)


@case(optimizers=("adamw",))
def grad_scaler_and_clipping(run: Run) -> None:
    _scaled(run, clip=True)


@case(core=True)
def compiled_then_attached(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(torch.compile(model, backend="aot_eager"), optimizer)
    train(run, model, optimizer, net)


@case()
def attached_then_compiled(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, model, optimizer, torch.compile(net, backend="aot_eager"))


def _frozen(run: Run, *, at: int | None, until: int) -> None:
    model = mlp()
    model[2].requires_grad_(at is not None)
    optimizer = run.optimizer(model.parameters())
    net: Any = run.attach(model, optimizer)
    for step in range(STEPS):
        if step in (at, until):
            net = None
            model[2].requires_grad_(step == until)
            net = run.way.again(model)
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(core=True)
def frozen_mid_run_and_unfrozen(run: Run) -> None:
    _frozen(run, at=6, until=13)


@case(optimizers=("sgd",))
def frozen_at_attach_and_unfrozen(run: Run) -> None:
    _frozen(run, at=None, until=8)


def _scheduled(run: Run, make: Callable[[Any], Any], *, first: bool) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    scheduler = make(optimizer) if first else None
    net = run.attach(model, optimizer)
    scheduler = scheduler or make(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        train(run, model, optimizer, net, after=lambda _step: scheduler.step())
    run.read(torch.tensor(scheduler.get_last_lr()))


@case(core=True)
def step_lr_built_before_attach(run: Run) -> None:
    _scheduled(run, lambda o: StepLR(o, 3, 0.5), first=True)


@case()
def step_lr_built_after_attach(run: Run) -> None:
    _scheduled(run, lambda o: StepLR(o, 3, 0.5), first=False)


@case()
def one_cycle_built_before_attach(run: Run) -> None:
    _scheduled(run, lambda o: OneCycleLR(o, 0.05, total_steps=STEPS + 1), first=True)


@case(core=True)
def one_cycle_built_after_attach(run: Run) -> None:
    _scheduled(run, lambda o: OneCycleLR(o, 0.05, total_steps=STEPS + 1), first=False)


@case(optimizers=("sgd",))
def learning_rate_set_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)

    def decay(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (step % 2)

    train(run, model, optimizer, net, after=decay)


@case(core=True)
def parameter_groups(run: Run) -> None:
    model = mlp()
    biases = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": biases, "lr": 0.002, "weight_decay": 0.0},
        {"params": matrices[:2], "lr": 0.01},
        {"params": matrices[2:]},
    ]
    optimizer = run.optimizer(groups)
    train(run, model, optimizer, run.attach(model, optimizer))


@case(core=True)
def ema_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(_step: int) -> None:
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.mul_(0.9).add_(p.detach(), alpha=0.1)
        run.read(average[-1])

    train(run, model, optimizer, net, after=follow)
    run.read(*average)


@case(optimizers=("adamw",))
def ema_by_foreach(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = [p.detach().clone() for p in model.parameters()]

    def follow(_step: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)

    train(run, model, optimizer, net, after=follow)
    run.read(*average)


@case()
def averaged_model(run: Run) -> None:
    model, optimizer, net = plain(run)
    average = AveragedModel(model)
    train(run, model, optimizer, net, after=lambda _step: average.update_parameters(model))
    run.read(*average.parameters(), average(run.batch(0)[0]))


@case(core=True)
def state_dict_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(
        run, model, optimizer, net, after=lambda _step: run.read(*(t.clone() for t in model.state_dict().values()))
    )  # fmt: skip


@case()
def optimizer_state_dict_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(
        run, model, optimizer, net, after=lambda _step: run.read(*_tensors(optimizer.state_dict()["state"]))
    )  # fmt: skip


@case()
def optimizer_state_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, model, optimizer, net, after=lambda _step: run.read(*_tensors(optimizer.state[model[0].weight])))


@case(optimizers=("adamw",))
def saved_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def save(step: int) -> None:
        file = io.BytesIO()
        torch.save(model.state_dict() if step % 2 else list(model.parameters()), file)
        file.seek(0)
        run.read(*_tensors(torch.load(file, weights_only=True)))

    train(run, model, optimizer, net, after=save)


@case()
def loaded_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    kept: list[Any] = []

    def go_back(step: int) -> None:
        if step == 5:
            kept.extend((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        elif step == 12:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        elif step == 15:
            optimizer.load_state_dict(kept[1])

    train(run, model, optimizer, net, after=go_back)


@case()
def evaluation_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.read(model(run.batch(step, 9)[0]))
        model.train()

    train(run, model, optimizer, net, after=evaluate)


@case(optimizers=("sgd",))
def evaluation_with_batchnorm(run: Run) -> None:
    model, optimizer, net = plain(run, convnet)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            out = model(run.batch(step, 9, shape=(6, 3, 8, 8))[0])
        # Rank 0's alone: whether another rank evaluates with its own statistics or rank 0's is not DDP's promise.
        run.seen["reads"].append(out.clone()) if run.rank == 0 else None
        model.train()

    train(run, model, optimizer, net, after=evaluate, shape=(6, 3, 8, 8))


@case(optimizers=("sgd",))
def values_read_by_python(run: Run) -> None:
    model, optimizer, net = plain(run)

    def look(step: int) -> None:
        bias, weight = model[6].bias, model[0].weight
        ways: list[Callable[[], Any]] = [
            lambda: bias.tolist(),
            lambda: bias.detach().numpy().copy(),
            lambda: [float(bias.detach()[0]), weight[0, 0].item()],
            lambda: [bias[1].item(), weight.sum().item(), *map(float, weight[0].detach())],
            lambda: nn.utils.parameters_to_vector(model.parameters())[-40:].detach(),
        ]
        run.read(torch.as_tensor(ways[step % len(ways)]()))

    train(run, model, optimizer, net, after=look)


@case()
def alias_from_before_attach(run: Run) -> None:
    model = mlp()
    alias = [p.data for p in model.parameters()]
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    train(run, model, optimizer, net, after=lambda _step: run.read(*alias))


@case(optimizers=("sgd",))
def alias_from_after_attach(run: Run) -> None:
    model, optimizer, net = plain(run)
    alias = [p.detach().view(-1)[:8] for p in model.parameters()]
    train(run, model, optimizer, net, after=lambda _step: run.read(torch.cat(alias)))


@case()
def deepcopy_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def twin(step: int) -> None:
        if step % 4 == 1:
            other = copy.deepcopy(model)
            run.read(*other.parameters())
            run.read(other(run.batch(step)[0]))

    train(run, model, optimizer, net, after=twin)


@case(optimizers=("adamw",))
def parameters_edited_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clamp(step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.data.clamp_(-0.1, 0.1) if step % 2 else p.clamp_(-0.1, 0.1)

    train(run, model, optimizer, net, after=clamp)


@case(core=True)
def gradients_read(run: Run) -> None:
    model, optimizer, net = plain(run)
    # Each step from another one on: what is not read is not waited for.
    some = list(model.parameters())
    train(run, model, optimizer, net, between=lambda step: run.read(*(p.grad for p in some[step % 4 :])))


@case(core=True)
def gradients_edited(run: Run) -> None:
    model, optimizer, net = plain(run)

    def edit(step: int) -> None:
        first, second, *others = model.parameters()
        first.grad.mul_(0.5)
        second.grad = second.grad + 0.01
        others[0].grad = None if step % 3 == 1 else others[0].grad
        others[-1].grad.data.add_(others[-1].data, alpha=0.01)

    train(run, model, optimizer, net, between=edit)


@case(optimizers=("sgd",))
def gradients_kept_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()
        if step % 2:
            run.read(*(p.grad for p in model.parameters()))


@case(core=True)
def zero_grad_before_backward(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(net, step).backward()
        optimizer.step()


@case(optimizers=("sgd",))
def zero_grad_after_forward(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(STEPS):
        loss = run.loss(net, step)
        model.zero_grad()
        loss.backward()
        optimizer.step()


@case(core=True)
def zero_grad_to_zeros(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(STEPS):
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@case(optimizers=("adamw",))
def zero_grad_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(STEPS):
        run.loss(net, step).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None


@case(core=True)
def skipped_steps(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(STEPS):
        run.loss(net, step).backward()
        if step % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()


@case(core=True)
def closure(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(STEPS):

        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(net, step)
            loss.backward()
            return loss

        run.read(optimizer.step(again))


@case(core=True, optimizers=("lbfgs",))
def lbfgs(run: Run) -> None:
    model = mlp()
    # Tolerances of 0: else a rank's own loss would decide how often it calls the closure.
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, history_size=5, tolerance_grad=0, tolerance_change=0
    )
    net = run.attach(model, optimizer)
    for step in range(STEPS):

        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(net, step)
            loss.backward()
            return loss

        optimizer.step(again)


@case(optimizers=("own",))
def optimizer_that_needs_all_gradients(run: Run) -> None:
    model = mlp()
    optimizer = NormalizedSgd(model.parameters())
    train(run, model, optimizer, run.attach(model, optimizer))


@case()
def functional_call(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, model, optimizer, lambda x: torch.func.functional_call(net, dict(net.named_parameters()), (x,)))


@case(optimizers=("sgd",))
def activation_checkpointing(run: Run) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    train(run, *plain(run, lambda: Checkpointed(*mlp())))


@case(optimizers=("adamw",))
def waited_for_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)
    views = [p.detach().numpy() for p in model.parameters()]  # nothing can see who reads these

    def look(_step: int) -> None:
        run.way.wait()
        run.read(*(torch.from_numpy(v.copy()) for v in views))

    train(run, model, optimizer, net, after=look)


# -- running them ------------------------------------------------------------------------------------------------------


def rows(world: int) -> list[str]:
    """The rows `case-optimizer` for a number of ranks: all with 2, the core with others, where optimizers alternate."""
    if world == 2:
        return [f"{name}-{kind}" for name, case in CASES.items() for kind in case.optimizers]
    # Where bf16 is to rounding, Adam can make a full step of it: SGD then.
    core = [(name, case.optimizers if not case.tolerance else BOTH[:1]) for name, case in CASES.items() if case.core]
    return [f"{name}-{kinds[(i + world) % min(2, len(kinds))]}" for i, (name, kinds) in enumerate(core)]


def run_rows(rank: int, world: int, wanted: list[str], exchange: str | None, ways: Any = (Ddp, Ours)) -> Any:
    """Run rows in both ways on this rank: problem text or None for each."""

    def one(row: str, group: dist.ProcessGroup) -> None:
        name, kind = row.rsplit("-", 1)
        chosen = CASES[name]
        # To rounding, but Adam and LBFGS divide by what may be no more than that: they are given doubles.
        double = world > 2 and kind != "sgd"
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        try:
            want, got = (once(chosen, make(group, exchange), rank, world, kind) for make in ways)
        finally:
            torch.set_default_dtype(torch.float32)
        exact = chosen.exact and world <= 2 and not (DEVICE[0] == "cuda" and name in NORMS)
        compare(want, got, *((0.0, 0.0) if exact else chosen.tolerance or ((1e-8, 1e-10) if double else (1e-4, 1e-6))))

    return guarded(wanted, one)


def once(chosen: Case, way: Any, rank: int, world: int, kind: str) -> dict[str, list[Tensor]]:
    """One case in one way. Every rank starts with other numbers: rank 0's must arrive."""
    torch.manual_seed(100 + rank)
    run = Run(way, rank, world, kind)
    try:
        chosen.function(run)
        return run.finish()
    finally:
        way.close()
        gc.collect()


def compare(want: dict[str, list[Tensor]], got: dict[str, list[Tensor]], rtol: float, atol: float) -> None:
    """Everything seen in both ways is alike; tolerances of 0 mean the same bits."""
    for what, expected in want.items():
        found = got[what]
        assert len(found) == len(expected), f"{what}: {len(expected)} tensors with DDP, {len(found)} with attach"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert b.dtype == a.dtype, f"{what} {i}: {a.dtype}, and {b.dtype} with DDP"
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=i, what=what: f"{what} {i}: {text}"
            )


def guarded(names: list[str], one: Callable[[str, dist.ProcessGroup], Any]) -> dict[str, str | None]:
    """Call `one(name, group)` for each name, and say what went wrong with it on any rank.

    Each gets a group and a time limit of its own, so that one that fails or hangs does not take others with it.
    """
    problems: dict[str, str | None] = {}
    hangs = 0
    gc.freeze()  # all of torch is in the heap: each collection would look through it
    for name in names:
        if hangs >= HANGS:
            problems[name] = f"not run: {hangs} others hung before"
            continue
        group = dist.new_group(timeout=timedelta(seconds=CASE_SECONDS))
        mine: tuple[str, bool] | None = None
        try:
            with _time_limit():
                one(name, group)
        except Exception as error:
            mine = traceback.format_exc(limit=-12), isinstance(error, TimeoutError)
        everyones: list[tuple[str, bool] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        hangs += any(p is not None and p[1] for p in everyones)
        problems[name] = "\n".join(f"rank {r}: {p[0]}" for r, p in enumerate(everyones) if p) or None
        if problems[name] is None:
            dist.destroy_process_group(group)
    return problems


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expired(_signal: int, _frame: Any) -> None:
        stacks = ["".join(traceback.format_stack(f, limit=6)) for f in sys._current_frames().values()]
        raise TimeoutError(f"{CASE_SECONDS} s are over. All threads:\n" + "\n".join(stacks))

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
