"""Loops over different kinds of models and parameters."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from loops.models import Mixed, Tied, convnet, mlp
from loops.table import plain, row, train
from loops.ways import DEVICE, Run


@row(core=True, tuned=True, steps=9)
def plain_sgd(run: Run) -> None:
    _, optimizer, net = plain(run)
    train(run, optimizer, net)


@row(core=True, optimizer="adamw")
def plain_adamw(run: Run) -> None:
    _, optimizer, net = plain(run)
    train(run, optimizer, net)


@row()
def channels_last(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: convnet().to(memory_format=torch.channels_last))
    train(run, optimizer, net, shape=(6, 3, 8, 8))


@row(core=True, optimizer="adamw", tuned=True, steps=8)
def tied_weights(run: Run) -> None:
    _, optimizer, net = plain(run, Tied)
    train(run, optimizer, net)


@row(core=True, tolerance=(5e-2, 5e-3))
def bf16_parameters(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: mlp().bfloat16())
    train(run, optimizer, lambda x: net(x.bfloat16()))


@row(tolerance=(1e-2, 1e-3))
def fp16_parameters(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: mlp().half())
    train(run, optimizer, lambda x: net(x.half()))


@row(optimizer="adamw")
def float64_parameters(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: mlp().double())
    train(run, optimizer, lambda x: net(x.double()))


@row()
def several_dtypes(run: Run) -> None:
    _, optimizer, net = plain(run, Mixed)
    train(run, optimizer, net)


class Spectral(nn.Module):
    """A complex filter between two real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 34), nn.Linear(34, 10)
        self.filter = nn.Parameter(torch.randn(18, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=34))
        return out


@row(core=True, ddp=False)
def complex_parameters(run: Run) -> None:
    _, optimizer, net = plain(run, Spectral)
    train(run, optimizer, net)


class ComplexOnly(nn.Module):
    """A complex matrix alone in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32, dtype=torch.complex64)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.mix(x.to(torch.complex64)).abs())
        return out


@row(ddp=False, optimizer="adamw")
def complex_matrix(run: Run) -> None:
    _, optimizer, net = plain(run, ComplexOnly)
    train(run, optimizer, net)


class Looked(nn.Module):
    """Parameters that are not trained: an integer table, a mask and a frozen float."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 10)
        self.table = nn.Parameter(torch.randperm(32), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(32) > 0.3, requires_grad=False)
        self.scale = nn.Parameter(torch.randn(32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x[:, self.table] * self.mask * self.scale)
        return out


@row(core=True)
def integer_and_bool_parameters(run: Run) -> None:
    model = Looked()
    optimizer = run.optimizer([p for p in model.parameters() if p.requires_grad])
    train(run, optimizer, run.attach(model, optimizer))


class Odd(nn.Module):
    """A scalar, an empty parameter, a vector of one value and thirty small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.one, self.last = nn.Parameter(torch.ones(1)), nn.Linear(32, 10)
        self.many = nn.ParameterList([nn.Parameter(torch.randn(1)) for _ in range(30)])

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scalar + self.one + self.empty.sum()
        out: Tensor = self.last(h * torch.cat([*self.many, self.one, self.one]))
        return out


@row(optimizer="adamw")
def scalar_empty_and_many_small_parameters(run: Run) -> None:
    _, optimizer, net = plain(run, Odd)
    train(run, optimizer, net)


class Transposed(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(34, 32).t() * 0.2)
        self.last = nn.Parameter(torch.randn(10, 34)[:, ::1].t() * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).tanh() @ self.last


@row()
def parameters_that_are_not_contiguous(run: Run) -> None:
    _, optimizer, net = plain(run, Transposed)
    train(run, optimizer, net)


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(32, 34) * 0.2, torch.randn(34, 10) * 0.2])
        self.more = nn.ParameterDict({"gain": torch.ones(34), "shift": torch.zeros(10)})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.layers[0] * self.more["gain"]).relu() @ self.layers[1] + self.more["shift"]


@row(optimizer="adamw")
def parameter_list_and_dict(run: Run) -> None:
    _, optimizer, net = plain(run, Listed)
    train(run, optimizer, net)


@row()
def embedding_bag(run: Run) -> None:
    model = nn.Sequential(nn.EmbeddingBag(64, 32, mode="mean"), nn.Linear(32, 10))
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        run.noted(F.mse_loss(net(run.tokens(step)), run.batch(step, shape=(4, 32))[1])).backward()
        optimizer.step()
        optimizer.zero_grad()


@row(optimizer="adamw")
def embedding_of_which_few_rows_are_used(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(200, 24, padding_idx=0), nn.Flatten(), nn.Linear(9 * 24, 10))
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        run.noted(net(run.tokens(step, 200)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@row()
def sparse_gradients_are_refused(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Flatten(), nn.Linear(9 * 32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def attempt() -> None:
        net = run.attach(model, optimizer)
        net(run.tokens(0)).square().mean().backward()

    run.refuses(attempt, "sparse")


@row()
def weight_norm(run: Run) -> None:
    _, optimizer, net = plain(
        run, lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 34)), nn.Tanh(), nn.Linear(34, 10))
    )
    train(run, optimizer, net)


@row(optimizer="adamw")
def spectral_norm(run: Run) -> None:
    _, optimizer, net = plain(
        run, lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(32, 34)), nn.Tanh(), nn.Linear(34, 10))
    )
    train(run, optimizer, net)


class Symmetric(nn.Module):
    """A parametrization of a square matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


@row()
def parametrized_and_cached(run: Run) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        with parametrize.cached():
            loss = run.loss(net, step) + run.loss(net, step, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@row(core=True)
def group_of_its_own(run: Run) -> None:
    """Pairs of ranks (single ranks where there are two) train apart from each other."""
    size = max(1, run.world // 2)
    groups = [dist.new_group(list(range(a, min(run.world, a + size)))) for a in range(0, run.world, size)]
    model = mlp()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer, process_group=groups[run.rank // size])
    train(run, optimizer, net)


@row(optimizer="adamw")
def two_models_on_two_groups(run: Run) -> None:
    """One model over all ranks, another on this rank alone."""
    mine = [dist.new_group([r]) for r in range(run.world)][run.rank]
    shared, local = mlp(), mlp()
    optimizers = run.optimizer(shared.parameters()), run.optimizer(local.parameters())
    nets = run.attach(shared, optimizers[0]), run.attach(local, optimizers[1], process_group=mine)
    for step in range(run.steps):
        (run.loss(nets[0], step) + run.loss(nets[1], step, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@row()
def users_collectives_between(run: Run) -> None:
    """The user's own collectives on the same group do not mix with the engine's."""
    model, optimizer, net = plain(run)

    def mean(_step: int) -> None:
        total = model[0].weight.detach().clone()
        dist.all_reduce(total, group=run.way.group)
        run.read(total)

    train(run, optimizer, net, after=mean)


@row()
def dropout(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: nn.Sequential(nn.Linear(32, 34), nn.Dropout(0.3), nn.Linear(34, 10)))
    torch.manual_seed(7 + run.rank)
    train(run, optimizer, net)


@row()
def keyword_arguments_and_tuples(run: Run) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 10), nn.Linear(32, 10)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(x) * scale}

    _, optimizer, net = plain(run, Pair)

    def both(x: Tensor) -> Tensor:
        out = net(x, scale=0.5)
        return out["a"] + out["b"]

    train(run, optimizer, both)


@row()
def input_that_requires_a_gradient(run: Run) -> None:
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        x, y = run.batch(step)
        x.requires_grad_()
        run.noted(F.mse_loss(net(x), y)).backward()
        run.read(x.grad)
        optimizer.step()
        optimizer.zero_grad()


@row()
def loss_with_parameters_of_its_own(run: Run) -> None:
    """Parameters in the optimizer that are not the model's stay local, as under DDP."""
    model, weights = mlp(), nn.Parameter(torch.ones(10, device=DEVICE[0]))
    optimizer = run.optimizer([*model.parameters(), weights])
    net = run.attach(model, optimizer)
    train(run, optimizer, lambda x: net(x) * weights)
    run.read(weights)


@row()
def regularized_by_hand(run: Run) -> None:
    """The loss reads parameters itself, after the forward pass."""
    model, optimizer, net = plain(run)
    for step in range(run.steps):
        loss = run.loss(net, step) + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@row(core=True)
def parameter_used_in_two_places(run: Run) -> None:
    """A weight read by name inside another module's forward, before its own module runs."""
    model = nn.Sequential(nn.Linear(32, 34), nn.Tanh(), nn.Linear(34, 32), nn.Linear(32, 10))
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)

    def reads_last_first(x: Tensor) -> Tensor:
        bonus = model[3].weight.mean(dim=1)
        out: Tensor = net(x)
        return out + bonus

    train(run, optimizer, reads_last_first)
