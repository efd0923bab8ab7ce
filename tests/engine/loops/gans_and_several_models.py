"""Loops with several models: GANs, distillation, momentum encoders, actor and critic."""

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loops.models import mlp
from loops.table import row
from loops.ways import DEVICE, Run


def _maker() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 34), nn.ReLU(), nn.Linear(34, 36), nn.ReLU(), nn.Linear(36, 32))


def _critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 36), nn.LeakyReLU(), nn.Linear(36, 34), nn.LeakyReLU(), nn.Linear(34, 1))


def _gan(run: Run, *, frozen: bool) -> None:
    maker, critic = _maker(), _critic()
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


@row(core=True)
def gan(run: Run) -> None:
    _gan(run, frozen=False)


@row(optimizer="adamw")
def gan_with_frozen_critic(run: Run) -> None:
    _gan(run, frozen=True)


@row(ddp=False, optimizer="adamw")
def wgan_with_gradient_penalty(run: Run) -> None:
    """The critic's loss has a gradient in it: double backward, and two critic steps for one of the maker."""
    maker, critic = _maker(), _critic()
    makes, judges = run.optimizer(maker.parameters()), run.optimizer(critic.parameters())
    make, judge = run.attach(maker, makes), run.attach(critic, judges)
    for step in range(run.steps):
        for inner in range(2):
            real, noise = run.batch(step, inner)[0], run.batch(step, 5 + inner, shape=(8, 16))[0]
            fake = make(noise).detach()
            mixed = (0.3 * real + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            run.noted(judge(fake).mean() - judge(real).mean() + 10 * penalty).backward()
            judges.step()
            judges.zero_grad()
        run.noted(-judge(make(run.batch(step, 9, shape=(8, 16))[0])).mean()).backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()


@row(ddp=False)
def wgan_with_clipped_weights(run: Run) -> None:
    maker, critic = _maker(), _critic()
    makes, judges = run.optimizer(maker.parameters(), lr=0.01), run.optimizer(critic.parameters(), lr=0.01)
    make, judge = run.attach(maker, makes), run.attach(critic, judges)
    for step in range(run.steps):
        real, noise = run.batch(step)[0], run.batch(step, 1, shape=(8, 16))[0]
        with torch.no_grad():
            fake = make(noise)
        run.noted(judge(fake).mean() - judge(real).mean()).backward()
        judges.step()
        judges.zero_grad()
        for p in critic.parameters():
            p.data.clamp_(-0.05, 0.05)
        run.noted(-judge(make(noise)).mean()).backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()


@row(ddp=False, rounds=("powersgd",))
def gan_in_one_module_with_two_optimizers(run: Run) -> None:
    model = nn.ModuleDict({"maker": _maker(), "critic": _critic()})
    makes, judges = run.optimizer(model["maker"].parameters()), run.optimizer(model["critic"].parameters())
    run.attach(model, makes, judges, unused=True)
    for step in range(run.steps):
        real, noise = run.batch(step)[0], run.batch(step, 1, shape=(8, 16))[0]
        fake = model["maker"](noise)
        run.noted(
            F.softplus(-model["critic"](real)).mean() + F.softplus(model["critic"](fake.detach())).mean()
        ).backward()
        judges.step()
        model.zero_grad()
        run.noted(F.softplus(-model["critic"](fake)).mean()).backward()
        makes.step()
        model.zero_grad()


@row(ddp=False)
def cycle_of_two_makers_and_one_optimizer(run: Run) -> None:
    """CycleGAN: one optimizer over two models, which are attached as one."""
    there, back = nn.Linear(32, 32), nn.Linear(32, 32)
    both = nn.ModuleList([there, back])
    optimizer = run.optimizer(itertools.chain(there.parameters(), back.parameters()))
    run.attach(both, optimizer)
    for step in range(run.steps):
        x, y = run.batch(step)[0], run.batch(step, 1)[0]
        run.noted(F.l1_loss(back(there(x)), x) + F.l1_loss(there(back(y)), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def distillation_from_a_frozen_teacher(run: Run) -> None:
    torch.manual_seed(5)
    teacher, student = mlp().to(DEVICE[0]).eval().requires_grad_(False), mlp()
    optimizer = run.optimizer(student.parameters())
    net = run.attach(student, optimizer)
    for step in range(run.steps):
        x, _ = run.batch(step)
        run.noted(F.kl_div(net(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(optimizer="adamw")
def momentum_encoder(run: Run) -> None:
    """BYOL, MoCo: a second network follows the first one's parameters, read right after the step."""
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    target = copy.deepcopy(model).requires_grad_(False)
    for step in range(run.steps):
        x, _ = run.batch(step)
        with torch.no_grad():
            wanted = target(run.batch(step, 1)[0])
        run.noted(1 - F.cosine_similarity(net(x), wanted).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    run.read(*target.parameters())


@row()
def target_network_copied_every_few_steps(run: Run) -> None:
    """DQN."""
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    target = mlp().to(DEVICE[0])
    target.load_state_dict(model.state_dict())
    for step in range(run.steps):
        x, _ = run.batch(step)
        with torch.no_grad():
            goal = target(run.batch(step, 1)[0]).max(-1).values
        run.noted(F.smooth_l1_loss(net(x)[:, 0], goal)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            target.load_state_dict(model.state_dict())


class ActorCritic(nn.Module):
    """Two heads over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(32, 34), nn.Linear(34, 10), nn.Linear(34, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.actor(h), self.critic(h)


@row(optimizer="adamw")
def actor_and_critic_over_one_trunk(run: Run) -> None:
    model = ActorCritic()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        x, y = run.batch(step)
        logits, value = net(x)
        advantage = y[:, 0] - value.squeeze(-1)
        policy = -(logits.log_softmax(-1)[:, 0] * advantage.detach()).mean()
        run.noted(policy + 0.5 * advantage.square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@row()
def siamese(run: Run) -> None:
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        a, b = (net(run.batch(step, micro)[0]) for micro in range(2))
        run.noted(F.cosine_embedding_loss(a, b, torch.ones(8, device=a.device))).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(core=True)
def two_models_with_one_loss(run: Run) -> None:
    models = [mlp(), mlp()]
    optimizers: list[Any] = [run.optimizer(m.parameters()) for m in models]
    nets = [run.attach(m, o) for m, o in zip(models, optimizers, strict=True)]
    for step in range(run.steps):
        run.loss(lambda x: nets[0](x) + nets[1](x), step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@row()
def two_models_one_after_the_other(run: Run) -> None:
    first, second = nn.Sequential(nn.Linear(32, 34), nn.Tanh()), nn.Linear(34, 10)
    optimizers = [run.optimizer(first.parameters()), run.optimizer(second.parameters())]
    nets = run.attach(first, optimizers[0]), run.attach(second, optimizers[1])
    for step in range(run.steps):
        run.loss(lambda x: nets[1](nets[0](x)), step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@row()
def two_models_trained_in_turns(run: Run) -> None:
    models = [mlp(), mlp()]
    optimizers: list[Any] = [run.optimizer(m.parameters()) for m in models]
    nets = [run.attach(m, o) for m, o in zip(models, optimizers, strict=True)]
    for step in range(run.steps):
        now = step % 2
        run.loss(nets[now], step).backward()
        optimizers[now].step()
        optimizers[now].zero_grad()
        with torch.no_grad():
            run.read(models[1 - now](run.batch(step)[0]))


@row()
def parameter_of_two_attached_models_is_refused(run: Run) -> None:
    shared = nn.Linear(32, 32)
    one, two = nn.Sequential(shared, nn.Linear(32, 10)), nn.Sequential(shared, nn.Linear(32, 4))

    def attempt() -> None:
        run.attach(one, run.optimizer(one.parameters()))
        run.attach(two, run.optimizer(two.parameters()))

    run.refuses(attempt, "attached")


@row()
def model_attached_twice_is_refused(run: Run) -> None:
    model = mlp()

    def attempt() -> None:
        run.attach(model, run.optimizer(model.parameters()))
        run.attach(model, run.optimizer(model.parameters()))

    run.refuses(attempt, "attached")
