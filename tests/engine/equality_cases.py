"""Training loops as people write them: each is run with torch DDP and with `syncline.attach`, by the same code.

A case is a function of a `Run`: it builds model and optimizer, attaches, trains, and shows what it read on the way
(`run.read`). What is compared: losses, everything read, final parameters, buffers, optimizer state.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality_models import BOTH, OPTIMIZERS, Branches, Gpt, Mixed, NormalizedSgd, Tied, convnet, mlp
from equality_table import case, plain, train
from equality_ways import DEVICE, Run
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR


@case(core=True, optimizers=tuple(OPTIMIZERS))
def plain_mlp(run: Run) -> None:
    train(run, *plain(run))


@case(core=True, optimizers=("adamw",))
def batchnorm_buffers(run: Run) -> None:
    train(run, *plain(run, convnet), shape=(6, 3, 8, 8))


@case(optimizers=("sgd",))
def channels_last(run: Run) -> None:
    train(run, *plain(run, lambda: convnet().to(memory_format=torch.channels_last)), shape=(6, 3, 8, 8))


@case(core=True, optimizers=("sgd",))
def accumulation(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        with run.way.no_sync(model):
            run.loss(net, step, 0).backward()
            run.loss(net, step, 1).backward()
        run.loss(net, step, 2).backward()
        optimizer.step()
        optimizer.zero_grad()


# DDP averages the first mean again together with the second gradient; the mean of the second alone, added to the
# first, is the same but for rounding.
@case(core=True, exact=False, optimizers=("adamw",))
def accumulation_without_no_sync(run: Run) -> None:
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step, 0).backward()
        run.loss(net, step, 1).backward()
        run.read(*(p.grad for p in model.parameters())) if step == 3 else None
        optimizer.step()
        optimizer.zero_grad()


def _branches(run: Run, set_to_none: bool) -> None:
    model = Branches(run.rank)
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, unused=True)
    for step in range(run.steps):
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


@case(core=True, optimizers=("adamw",))
def tied_weights(run: Run) -> None:
    train(run, *plain(run, Tied))


@case(core=True, optimizers=("adamw",))
def gpt_tied_head(run: Run) -> None:
    model = Gpt()
    optimizer = run.optimizer(model.parameters(), lr=2e-3)
    net = run.attach(model, optimizer)
    for step in range(run.steps):
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
    for step in range(run.steps):
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
    for step in range(run.steps):
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


@case(core=True, optimizers=("sgd",))
def clip_grad_norm(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clip(_step: int) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        run.read(norm)
        assert norm > 0.05, "the bound does not bite"

    train(run, model, optimizer, net, between=clip)


@case(core=True, optimizers=("adamw",))
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
    for step in range(run.steps):
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


@case(core=True, optimizers=("sgd",))
def compiled_then_attached(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(torch.compile(model, backend="aot_eager"), optimizer)
    train(run, model, optimizer, net)


# Right after the row above, which has compiled the same code: tracing then begins while updates are in flight, and
# AdamW rounds otherwise where it takes itself for traced.
@case(optimizers=("adamw",))
def attached_then_compiled(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, model, optimizer, torch.compile(net, backend="aot_eager"))


def _frozen(run: Run, *, at: int | None, until: int) -> None:
    model = mlp()
    model[2].requires_grad_(at is not None)
    optimizer = run.optimizer(model.parameters())
    net: Any = run.attach(model, optimizer)
    for step in range(run.steps):
        if step in (at, until):
            net = None
            model[2].requires_grad_(step == until)
            net = run.way.again(model)
        run.loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(core=True)
def frozen_mid_run_and_unfrozen(run: Run) -> None:
    _frozen(run, at=run.steps * 3 // 10, until=run.steps * 13 // 20)


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


@case(optimizers=("sgd",))
def step_lr_built_after_attach(run: Run) -> None:
    _scheduled(run, lambda o: StepLR(o, 3, 0.5), first=False)


@case(optimizers=("adamw",))
def one_cycle_built_before_attach(run: Run) -> None:
    _scheduled(run, lambda o: OneCycleLR(o, 0.05, total_steps=run.steps + 1), first=True)


@case(core=True)
def one_cycle_built_after_attach(run: Run) -> None:
    _scheduled(run, lambda o: OneCycleLR(o, 0.05, total_steps=run.steps + 1), first=False)


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
def skipped_steps(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        run.loss(net, step).backward()
        if step % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()


@case(core=True, optimizers=("adamw",))
def closure(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):

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
    for step in range(run.steps):

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


@case(optimizers=("sgd",))
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
