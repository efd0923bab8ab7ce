"""Parameters of every kind: complex, integer, bool, frozen, empty, 0-dim, not contiguous, views of one tensor."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline
from ranks import run_ranks
from syncline.codecs import reshard
from syncline.plan import Plan, Unit, shape_of

STEPS = 5
CODECS = ("none", "bf16", "powersgd(rank=2)", "topk(ratio=0.1)", "int8")


class Complex(nn.Module):
    """A model with complex parameters; `real`: the same values as real parameters with a last dimension of 2.

    Its gradients are lazily conjugated (`lazy`; torch's Adam refuses those), not contiguous, 0-dim, empty, and of two
    precisions.
    """

    def __init__(self, seed: int, *, real: bool = False, lazy: bool = True) -> None:
        super().__init__()
        self.lazy = lazy
        numbers = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(6, 8)
        with torch.no_grad():
            for p in self.first.parameters():
                p.copy_(torch.randn(p.shape, generator=numbers))
        shapes = {"w": (8, 6), "conj": (6,), "turned": (4, 6), "scalar": (), "empty": (0, 3), "wide": (4,)}
        for name, shape in shapes.items():
            dtype = torch.complex128 if name == "wide" else torch.complex64
            values = torch.randn(shape, dtype=dtype, generator=numbers) * 0.5
            if name == "turned":
                values = values.t()
            setattr(self, name, nn.Parameter(torch.view_as_real(values).clone() if real else values))

    def forward(self, x: Tensor) -> Tensor:
        w, conj, turned, scalar, empty, wide = (
            p if p.is_complex() else torch.view_as_complex(p)
            for p in (self.w, self.conj, self.turned, self.scalar, self.empty, self.wide)
        )
        z = torch.tanh(self.first(x)).to(torch.complex64) @ w + (conj.conj() if self.lazy else conj)
        z = (z @ turned * scalar + empty.sum()).to(torch.complex128) * wide
        return z.abs().square().mean()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def numbers_of(tensors: dict[str, Any]) -> dict[str, list[float]]:
    """Tensors as numbers that can be compared to the bit."""
    found = {n: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for n, t in tensors.items()}
    assert all(t.double().isfinite().all() for t in found.values())
    return {n: t.detach().double().flatten().tolist() for n, t in found.items()}


def values(model: nn.Module) -> dict[str, list[float]]:
    """All parameters and buffers."""
    return numbers_of(dict([*model.named_parameters(), *model.named_buffers()]))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, inner: nn.Module) -> Any:
    for step in steps:
        model(inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(inner)


def complex_ranks(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for kind in (torch.optim.SGD, torch.optim.Adam):
        for way in ("ddp", "attach"):
            # Gloo cannot send DDP's complex parameters, so replicas begin equal.
            model = Complex(0, lazy=kind is torch.optim.SGD)
            optimizer = kind(model.parameters(), lr=0.02)
            if way == "ddp":
                wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False)
                seen[f"{way} {kind.__name__}"] = train(wrapped, optimizer, rank, range(STEPS), model)
            else:
                sync = syncline.attach(model, optimizer)
                seen[f"{way} {kind.__name__}"] = train(model, optimizer, rank, range(STEPS), model)
                sync.close()
    for spec in CODECS:
        for real in (False, True):
            model = Complex(rank, real=real)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            sync = syncline.attach(model, optimizer, compress=spec, tune=False, sentinel=2)
            model(inputs(rank, STEPS)).backward()
            seen[f"{spec} gradients real={real}"] = numbers_of({n: p.grad for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            seen[f"{spec} state real={real}"] = numbers_of(sync.state_dict())
            seen[f"{spec} values real={real}"] = train(model, optimizer, rank, range(STEPS), model)
            seen[f"{spec} shapes real={real}"] = {n: tuple(t.shape) for n, t in sync.state_dict().items()}
            sync.close()
    seen["resumed"], seen["partitions"], seen["hook"] = resumed(rank), partitions(rank), hook(rank)
    return seen


def resumed(rank: int) -> tuple[Any, Any]:
    """Trained in one go, and with a checkpoint between."""
    found = []
    for stop in (None, 2):
        model = Complex(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        sync = syncline.attach(model, optimizer, compress="topk(ratio=0.2)", tune=False)
        if stop is not None:
            train(model, optimizer, rank, range(stop), model)
            state = sync.state_dict()
            assert reshard([state, state], 2, keep="mean")[0].keys() == state.keys()
            sync.close()
            sync = syncline.attach(model, optimizer, compress="topk(ratio=0.2)", tune=False)
            sync.load_state_dict(state)
        found.append(train(model, optimizer, rank, range(stop or 0, STEPS), model))
        sync.close()
    return found[0], found[1]


def partitions(rank: int) -> tuple[Any, Any]:
    """A dense plan whose parts cut through complex numbers, and the default plan."""
    found = []
    for cut in (False, True):
        model = Complex(0)
        names = [n for n, _ in model.named_parameters()]
        units = [Unit("a", tuple(n for n in names if n != "wide"), partitions=7), Unit("b", ("wide",), partitions=2)]
        order = [(unit.name, part) for unit in units for part in range(unit.partitions)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        sync = syncline.attach(model, optimizer, plan=Plan(tuple(units), tuple(order)) if cut else None)
        found.append(train(model, optimizer, rank, range(STEPS), model))
        sync.close()
    return found[0], found[1]


def hook(rank: int) -> tuple[Any, Any]:
    """DDP with `ddp_hook`, on complex and on real parameters."""
    found = []
    for real in (False, True):
        model = Complex(0, real=real)
        wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False)
        wrapped.register_comm_hook(*syncline.ddp_hook("bf16"))
        wrapped(inputs(rank, 0)).backward()
        found.append(numbers_of({n: p.grad for n, p in model.named_parameters()}))
    return found[0], found[1]


def test_complex_parameters_train_as_under_ddp_and_as_their_real_views() -> None:
    first, second = run_ranks(complex_ranks, 2)
    for optimizer in ("SGD", "Adam"):
        assert first[f"attach {optimizer}"] == first[f"ddp {optimizer}"] == second[f"attach {optimizer}"], optimizer
    for spec in CODECS:
        assert first[f"{spec} values real=False"] == second[f"{spec} values real=False"], f"{spec}: replicas are equal"
        for seen in (first, second):
            for what in ("gradients", "state", "shapes"):
                assert seen[f"{spec} {what} real=False"] == seen[f"{spec} {what} real=True"], f"{spec}: {what}"
            # torch rounds complex updates differently.
            trained, as_real = (seen[f"{spec} values real={real}"] for real in (False, True))
            for name in trained:
                assert trained[name] == pytest.approx(as_real[name], rel=1e-3, abs=1e-4), f"{spec}: {name}"
    assert first["topk(ratio=0.1) shapes real=False"]["w.error"] == (8, 6, 2)
    for what in ("resumed", "partitions", "hook"):
        assert first[what] == second[what], what
        assert first[what][0] == first[what][1], what


def test_the_plan_sees_a_complex_parameter_as_real() -> None:
    shape = shape_of("w", torch.zeros(3, 4, dtype=torch.complex128))
    assert (shape.shape, shape.dtype, shape.values, shape.nbytes) == ((3, 4, 2), torch.float64, 24, 192)


class Everything(nn.Module):
    """State of all dtypes and layouts; only some of it trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=numbers)

        kinds = [torch.int64, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float16, torch.bfloat16]
        kinds += [torch.float64, torch.float32, torch.complex64]
        self.frozen = nn.ParameterList([nn.Parameter((random(5) * 9).to(k), requires_grad=False) for k in kinds])
        for at, kind in enumerate(kinds):
            self.register_buffer(f"buffer{at}", (random(3) * 9).to(kind))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale, self.empty = nn.Parameter(random().squeeze()), nn.Parameter(torch.empty(4, 0))
        self.turned = nn.Parameter(random(4, 6).t())
        flat = random(20)
        self.a, self.b = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:])  # of one tensor
        self.wide, self.narrow = nn.Parameter(random(6).double()), nn.Parameter(random(6).bfloat16())
        with torch.no_grad():
            for p in self.conv.parameters():
                p.copy_(random(*p.shape))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x[:, None, :, None].expand(4, 3, 6, 6).contiguous(memory_format=torch.channels_last))
        y = y.flatten(1)[:, :4] * self.scale + self.empty.sum()
        z = (y @ self.turned.t() + (y[:, :3] @ self.a @ self.turned.t())) * self.wide * self.narrow.double()
        return (z.square().mean() + self.b.square().sum()).float()


def every_kind(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for way in ("plain", "attach"):
            model = Everything(rank)
            optimizer = kind(model.parameters(), lr=0.01)
            sync = syncline.attach(model, optimizer) if way == "attach" else None
            if sync is None:
                model.load_state_dict(Everything(0).state_dict())
            seen[f"{way} start"] = values(model)
            for step in range(STEPS):
                model(inputs(rank, step)).backward()
                if sync is None:
                    for p in model.parameters():
                        if p.grad is not None and p.grad.numel():
                            mean = p.grad.contiguous() / world
                            dist.all_reduce(mean)
                            p.grad.copy_(mean)
                optimizer.step()
                optimizer.zero_grad()
            seen[f"{way} {kind.__name__}"] = values(model)
            if sync is not None:
                sync.close()
    return seen


def test_every_dtype_and_layout_starts_as_on_rank_0_and_trains_as_in_the_plain_loop() -> None:
    first, second = run_ranks(every_kind, 2)
    assert first == second
    for what in ("start", "SGD", "AdamW"):
        assert first[f"attach {what}"] == first[f"plain {what}"], what
