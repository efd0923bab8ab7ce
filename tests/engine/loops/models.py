"""Small models and optimizers of the loops."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, lr=0.05, **more: SGD(p, lr=lr, momentum=0.9, **{"weight_decay": 1e-3, **more}),
    "adamw": lambda p, lr=5e-3, **more: AdamW(p, lr=lr, **{"weight_decay": 0.1, **more}),
}


def scripted(what: Any, *example: Any) -> Any:
    """TorchScript of a function or module, by its source or (with an example) by a trace."""
    # Else TorchScript changes its code after some runs, and with it the rounding.
    torch._C._jit_set_profiling_executor(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(what, *example) if example else torch.jit.script(what)


def mlp() -> nn.Sequential:
    """Four layers of different sizes."""
    return nn.Sequential(
        nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 34), nn.Tanh(), nn.Linear(34, 10),
    )  # fmt: skip


def wide_mlp() -> nn.Sequential:
    """The same with more values, for tests that measure or cut messages."""
    return nn.Sequential(
        nn.Linear(32, 160), nn.ReLU(), nn.Linear(160, 128), nn.ReLU(), nn.Linear(128, 136), nn.Tanh(),
        nn.Linear(136, 10),
    )  # fmt: skip


def convnet() -> nn.Sequential:
    """Two convolutions with BatchNorm."""
    # No bias before a BatchNorm: its gradient is nothing but rounding, which Adam blows up to full steps.
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 4, 10),
    )  # fmt: skip


class Branches(nn.Module):
    """`never` is not used, `some` on odd ranks only, `alternate` in even steps only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.never, self.some, self.alternate = nn.Linear(32, 64), nn.Linear(32, 34), nn.Linear(32, 34)
        self.first, self.last = nn.Linear(32, 34), nn.Linear(34, 10)
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
        self.first, self.a, self.b = nn.Linear(32, 34), nn.Linear(34, 34), nn.Linear(34, 34)
        self.twice, self.last = nn.Linear(34, 34), nn.Linear(34, 10)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(self.first(x)).tanh()).tanh()
        out: Tensor = self.last(self.twice(self.twice(h).tanh()))
        return out


class Gpt(nn.Module):
    """A small transformer whose head is the embedding's weight, used by this module's forward."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
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


class Mixed(nn.Module):
    """A dtype a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 34), nn.Linear(34, 34).bfloat16(), nn.Linear(34, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x).tanh().bfloat16()).tanh().double())
        return out


class Raw(nn.Module):
    """Two layers whose parameters the module itself reads, as `read(module)` says."""

    def __init__(self, read: Callable[["Raw", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(32, 34) * 0.2), nn.Parameter(torch.randn(34) * 0.1)
        self.last = nn.Linear(34, 10)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.read(self, x))
        return out


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
