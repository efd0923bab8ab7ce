"""The training loops of `bench causes`: DDP with BatchNorm, attach, FSDP2 and a GAN, with places for a delay.

On a CPU, forward and backward are mostly pauses, as if an accelerator computed: they need no core, so that other
programs on the machine hardly change a step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from syncline.bench.causes.cases import Case
from syncline.engine import attach
from syncline.plan.table import Plan
from syncline.plan.unit import Unit

_FORWARD_S, _BACKWARD_S = 0.004, 0.008
_BATCH = {"cpu": 8, "cuda": 8192}
_LAYERS, _WIDTH = 12, 2048  # on a GPU
_TINY_KERNEL_MS = 0.02  # host time to launch one small kernel under the profiler, about
_PYTHON_MS = 0.08  # host time between two small kernels
_ROUNDS_PER_MS = 25_000


class Injection:
    """The cause of a case on one rank. `fired` counts how often it acted."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.on, self.fired = case, False, 0
        self._late = rank in case.late
        self._random = Random(case.seed + rank)

    def at(self, where: str) -> None:
        """A place in the loop: delays this rank if the case says so."""
        if self.on and self._late and where == self.case.where:
            # Delays of real causes are never equal.
            time.sleep(self.case.ms / 1e3 * self._random.uniform(0.95, 1.05))
            self.fired += 1

    def compute(self, share: float, pause_s: float) -> None:
        """A pass over the model: work for a core if cores are to be short, else a pause."""
        if self.case.cause == "oversubscription":
            _spin(round(share * self.case.ms * _ROUNDS_PER_MS))
        else:
            time.sleep(pause_s)

    def layer(self, x: Tensor) -> None:
        """A layer on the GPU: host work, kernels too small for it, or a synchronisation."""
        if self.on:
            self._slow_layer(x)
            self.fired += 1
        if self.case.cause == "sync points":
            _busy(self.case.ms)  # hidden behind the GPU's work unless the GPU has just been waited for

    def _slow_layer(self, x: Tensor) -> None:
        case = self.case
        if case.where == "python":
            _busy(case.ms)
        elif case.where == "launches":
            tiny = x.detach().view(-1)[:32]
            for _ in range(round(case.ms / (_PYTHON_MS + _TINY_KERNEL_MS))):
                _busy(_PYTHON_MS)
                tiny = tiny + 1.0
        elif case.where == "item":
            x.detach().view(-1)[0].item()
        elif case.where == "copy":
            x.detach().view(-1)[:1024].cpu()
        elif case.where == "synchronize":
            torch.cuda.synchronize()


def _spin(rounds: int) -> int:
    """Work for one core: the same number of instructions whenever it runs."""
    total = 0
    for number in range(rounds):
        total += number
    return total


def _busy(ms: float) -> None:
    """Keep the host busy for some time."""
    until = time.perf_counter() + ms / 1e3
    while time.perf_counter() < until:
        pass


class _Scale(nn.Module):
    """A small parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Network(nn.Module):
    """A convolution with BatchNorm, two linear layers of the wanted size, and small parameters."""

    def __init__(self, injection: Injection, *, megabytes: float, tensors: int) -> None:
        super().__init__()
        hidden = max(16, round(megabytes * 1e6 / 4 / (8 * 36 + 16)))
        self.injection = injection
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.linear = nn.Sequential(nn.Linear(8 * 36, hidden), nn.ReLU(), nn.Linear(hidden, 16))
        self.small = nn.ModuleList(_Scale() for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        self.injection.compute(1 / 3, _FORWARD_S)
        self.injection.at("forward")
        x = self.conv(x)
        x.register_hook(self._in_backward)
        x = self.linear(x)
        for scale in self.small:
            x = scale(x)
        return x

    def _in_backward(self, _: Tensor) -> None:
        self.injection.compute(2 / 3, _BACKWARD_S)
        self.injection.at("backward")


class _Stack(nn.Module):
    """Linear layers that keep a GPU busy, with BatchNorm after the first."""

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self.injection = injection
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x).relu()
            self.injection.layer(x)
        return x


@dataclass(frozen=True)
class Loop:
    """What a training loop consists of. `step` trains on one batch."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[Tensor], None]


def build_loop(case: Case, injection: Injection, device: torch.device, *, split: bool) -> Loop:
    """The loop of a case; `split` sends every small parameter as a message of its own."""
    torch.manual_seed(case.seed)
    return _LOOPS[case.loop](case, injection, device, split)


def batches(injection: Injection, device: torch.device) -> Iterator[Tensor]:
    """A data loader without end."""
    shape = (3, 8, 8) if device.type == "cpu" else (_WIDTH,)
    # A critic is trained three times on a batch.
    size = _BATCH[device.type] // (2 if injection.case.loop == "gan" else 1)
    batch = torch.randn(size, *shape, device=device)
    while True:
        injection.at("data")
        yield batch


def _network(case: Case, injection: Injection, device: torch.device) -> nn.Module:
    if device.type == "cuda":
        return _Stack(injection).to(device)
    return _Network(injection, megabytes=case.megabytes, tensors=case.tensors)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def _in_ddp(model: nn.Module, split: bool) -> nn.Module:
    # A bucket is closed by the first gradient that reaches its size.
    return DistributedDataParallel(model, bucket_cap_mb=1e-6 if split else None)


def _plain(model: nn.Module, injection: Injection) -> Loop:
    optimizer = _sgd(model)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        injection.at("update")
        optimizer.step()
        optimizer.zero_grad()
        injection.at("between")

    return Loop([model], [optimizer], step)


def _ddp(case: Case, injection: Injection, device: torch.device, split: bool) -> Loop:
    return _plain(_in_ddp(_network(case, injection, device), split), injection)


def _attached(case: Case, injection: Injection, device: torch.device, split: bool) -> Loop:
    model = _network(case, injection, device)
    loop = _plain(model, injection)
    names = [name for name, _ in model.named_parameters()]
    units = tuple(Unit(name, (name,)) for name in names)
    plan = Plan(units, tuple((name, 0) for name in reversed(names)), executor="reducer")
    attach(model, loop.optimizers, plan=plan if split else None, plan_cache=False)
    return loop


def _fsdp(case: Case, injection: Injection, device: torch.device, split: bool) -> Loop:
    model: Any = _network(case, injection, device)
    mesh = init_device_mesh(device.type, (case.ranks,))
    for part in model.layers if device.type == "cuda" else [model.linear, *(model.small if split else ())]:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model, injection)


def _gan(case: Case, injection: Injection, device: torch.device, split: bool) -> Loop:
    generator: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
    if device.type == "cuda":
        generator = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.ReLU()).to(device)
    generator, critic = _in_ddp(generator, split), _in_ddp(_network(case, injection, device), split)
    of_generator, of_critic = _sgd(generator), _sgd(critic)

    def step(x: Tensor) -> None:
        with torch.no_grad():
            made = generator(x)
        critic(torch.cat([x, made])).square().mean().backward()
        injection.at("update")
        of_critic.step()
        of_critic.zero_grad()
        critic(generator(x)).square().mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        injection.at("between")

    return Loop([generator, critic], [of_critic, of_generator], step)


_LOOPS: dict[str, Callable[[Case, Injection, torch.device, bool], Loop]] = {
    "ddp": _ddp,
    "attach": _attached,
    "fsdp": _fsdp,
    "gan": _gan,
}
