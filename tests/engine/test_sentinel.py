"""The sentinel: replicas that differ are repaired, units with exploding residuals become dense, alike on all ranks."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline
from ranks import run_ranks
from syncline.codecs import Mean, Out, Steps
from syncline.codecs.definition import Definition
from syncline.codecs.state import State
from syncline.engine.health.sentinel import LIMIT, dense
from syncline.engine.launch.units import checksum
from syncline.errors import SynclineWarning, UsageError
from syncline.plan import Plan, Shape, Unit, default_plan
from syncline.trace import Recorder

LR = 0.01


def test_one_different_bit_changes_the_checksum() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        values = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        other = values.clone()
        other[3, 2] = torch.nextafter(values[3, 2], torch.tensor(9.0, dtype=dtype))
        assert checksum(values) == checksum(values.clone())
        assert checksum(values) == checksum(values.t()), "memory layout is no difference"
        assert checksum(values) != checksum(other)
    assert checksum(torch.tensor([torch.nan])) == checksum(torch.tensor([torch.nan]))
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3)), "bit-exact"
    assert checksum(torch.empty(0)) == 0


def test_a_dense_plan_keeps_the_order() -> None:
    units = (Unit("a", ("a",), "topk(0.1)", "allgather", 2), Unit("b", ("b",), "topk(0.1)", "allgather", 2))
    plan = dense(Plan(units, (("b", 1), ("a", 0), ("b", 0), ("a", 1))), {"b"})
    assert plan.units == (units[0], Unit("b", ("b",)))
    assert plan.order == (("b", 0), ("a", 0), ("a", 1))
    plan.check([Shape("a", (8,)), Shape("b", (8,))])


# -- on ranks


def _runaway(grad: Tensor, state: State) -> Steps:
    """Claims to have sent the opposite of what it sent, tenfold: its residual explodes."""
    x = state.compensate(grad)
    mean = yield Mean(grad)
    return Out(mean, -9 * x)


def _overflows(grad: Tensor, state: State) -> Steps:
    """Its residual is infinite on rank 1 while what it gives is finite."""
    x = state.compensate(grad)
    mean = yield Mean(grad)
    return Out(mean, x - (torch.inf if state.rank == 1 and state.step == 1 else 1.0))


# Not registered: the list of codecs must not change.
runaway = Definition("runaway", _runaway, "own", "flat", "nothing", None, (), False, False, False)
overflows = Definition("overflows", _overflows, "own", "flat", "nothing", None, (), False, False, False)


def build(spec: str, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    shapes = [Shape(name, tuple(p.shape)) for name, p in net.named_parameters()]
    plan = default_plan(shapes, compress=spec, group_bytes=0)
    return net, optimizer, syncline.attach(net, optimizer, plan=plan, **options)


def train(net: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(net: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in net.parameters()]


def codecs_of(sync: Any) -> list[str]:
    return [unit.codec for unit in sync.plan.units]


def diverges(rank: int, world: int, spec: str, odd: int) -> dict[str, Any]:
    recorder = Recorder(rank=rank)
    net, optimizer, sync = build(spec, sentinel=3, recorder=recorder)
    seen: dict[int, list[str]] = {}
    before: list[list[float]] = []
    for step in range(7):
        if step == 4:
            if rank == odd:
                with torch.no_grad():
                    net[2].weight.data.add_(1e-3)
            before = values(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(net, optimizer, rank, step)
        if caught:
            seen[step + 1] = [str(w.message) for w in caught if w.category is SynclineWarning]
    done = {"seen": seen, "before": before, "after": values(net), "codecs": codecs_of(sync)}
    sync.close()
    spans = [span.step for span in recorder.spans() if span.name == "sentinel"]
    return {**done, "spans": len(spans), "lr": optimizer.param_groups[0]["lr"]}


@pytest.mark.parametrize(("spec", "odd"), [("none", 1), ("topk(0.25)", 1), ("topk(0.25)", 0)])
def test_replicas_that_differ_are_named_and_repaired(spec: str, odd: int) -> None:
    done = run_ranks(diverges, 3, spec, odd)
    assert done[odd]["before"] != done[2]["before"], "the fault fired"
    for d in done:
        assert list(d["seen"]) == [6], "after the next checked step, and never again"
        assert d["seen"] == done[0]["seen"]
        (text,) = d["seen"][6]
        assert f"'2.weight' on rank {odd};" in text
        assert f"with the parameters of rank {0 if odd else 1}" in text
        assert "optimizer state stays" in text
        assert ("unit '2' will be sent dense" if spec != "none" else "dense already") in text
        assert d["after"] == done[0]["after"]
        assert d["codecs"] == (["none", "none"] if spec == "none" else [spec, "none"])
        assert d["spans"] == 3, "steps 1, 3 and 6"


def runs_away(rank: int, world: int) -> dict[str, Any]:
    net, optimizer, sync = build(f"{__name__}:runaway", sentinel=2)
    seen: dict[int, list[str]] = {}
    owed: list[Tensor] = []
    grads: list[Tensor] = []
    paid: list[Tensor] = []
    replicas = []
    for step in range(8):
        if len(seen) == 1 and not owed:
            state = sync.state_dict()
            owed = [state[f"{name}.error"] for name, _ in net.named_parameters()]
            hooks = [p.register_hook(lambda g: grads.append(g.detach().clone())) for p in net.parameters()]
            start = [p.detach().clone() for p in net.parameters()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(net, optimizer, rank, step)
        replicas.append(values(net))
        if owed and not paid:
            paid = [(a - p.detach()) / LR for a, p in zip(start, net.parameters(), strict=True)]
            for hook in hooks:
                hook.remove()
        if caught:
            seen[step + 1] = [str(w.message) for w in caught]
    left = [key for key in sync.state_dict() if key.endswith(".error")]
    sync.close()
    by_shape = {tuple(g.shape): g.tolist() for g in grads}
    return {
        "seen": seen, "codecs": codecs_of(sync), "replicas": replicas, "left": left, "step": sync.step,
        "owed": [e.tolist() for e in owed], "paid": [p.tolist() for p in paid], "grads": by_shape,
    }  # fmt: skip


def test_a_residual_that_explodes_falls_back_to_dense_and_is_sent() -> None:
    done = run_ranks(runs_away, 2)
    for d in done:
        assert d["seen"] == done[0]["seen"]
        assert d["replicas"] == done[0]["replicas"]
        assert list(d["seen"]) == [4], "tenfold a step: above the limit in the fourth"
        assert len(d["seen"][4]) == 2
        assert "unit '0' (test_sentinel:runaway) holds back" in d["seen"][4][0]
        assert "on ranks 0, 1 (the limit is 1000 times it)" in d["seen"][4][0]
        assert "is sent with the next gradient" in d["seen"][4][0]
        assert d["codecs"] == ["none", "none"]
        assert d["left"] == [], "nothing is owed any more"
        assert d["step"] == 8
    for at, paid in enumerate(done[0]["paid"]):
        update = torch.tensor(paid)
        shape = tuple(update.shape)
        mass = sum(torch.tensor(d["owed"][at]) + torch.tensor(d["grads"][shape]) for d in done) / 2
        assert mass.norm() > LIMIT * 0.01
        torch.testing.assert_close(update, mass, rtol=1e-3, atol=1e-3 * float(mass.abs().max()))


def overflow(rank: int, world: int) -> dict[str, Any]:
    net, optimizer, sync = build(f"{__name__}:overflows", sentinel=2)
    seen: dict[int, list[str]] = {}
    replicas = []
    for step in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(net, optimizer, rank, step)
        replicas.append(values(net))
        if caught:
            seen[step + 1] = [str(w.message) for w in caught]
    sync.close()
    return {"seen": seen, "codecs": codecs_of(sync), "replicas": replicas}


def test_a_residual_that_is_not_finite_is_dropped() -> None:
    done = run_ranks(overflow, 2)
    for d in done:
        assert d["seen"] == done[0]["seen"]
        assert list(d["seen"]) == [2]
        assert "(on rank 1 it was not finite and is dropped)" in d["seen"][2][0]
        assert d["codecs"] == ["none", "none"]
        assert d["replicas"] == done[0]["replicas"]
        assert all(torch.tensor(p).isfinite().all() for p in d["replicas"][-1])


def two_optimizers(rank: int, world: int) -> dict[str, Any]:
    """Each has one of the layers: the first one's step must not take away what the second has still to commit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    both = [torch.optim.SGD(net[at].parameters(), lr=LR) for at in (0, 2)]
    shapes = [Shape(name, tuple(p.shape)) for name, p in net.named_parameters()]
    plan = default_plan(shapes, compress=f"{__name__}:runaway", group_bytes=0)
    sync = syncline.attach(net, both, plan=plan, sentinel=2)
    seen: list[tuple[int, int, list[str]]] = []
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)
        F.mse_loss(net(x), y).backward()
        for number, optimizer in enumerate(both):
            errors = {k: float(v.norm()) for k, v in sync.state_dict().items() if k.endswith("weight.error")}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            if caught or (seen and seen[-1][0] == step):
                grown = float(sync.state_dict().get("2.weight.error", torch.zeros(1)).norm())
                seen.append((step, number, [*codecs_of(sync), grown / errors.get("2.weight.error", torch.inf)]))
        for optimizer in both:
            optimizer.zero_grad()
    sync.close()
    return {"seen": seen, "values": values(net)}


def test_a_unit_falls_back_after_a_step_that_is_still_to_come() -> None:
    done = run_ranks(two_optimizers, 2)
    assert done[0]["values"] == done[1]["values"]
    name = "test_sentinel:runaway"
    for d in done:
        first, second = d["seen"]
        assert first == (3, 0, ["none", name, 1.0])
        assert second[:2] == (3, 1)
        assert second[2][:2] == ["none", "none"]
        assert 8 < second[2][2] < 12, "the second optimizer's step committed its residual before"


def quiet(rank: int, world: int, spec: str) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, optimizer, sync = build(spec, sentinel=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for step in range(12):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)
            scaler.scale(F.mse_loss(net(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        sync.close()
    return sum(w.category is SynclineWarning for w in caught)


@pytest.mark.parametrize("spec", ["topk(0.01)", "threshold(1e9)", "powersgd(rank=1)"])
def test_healthy_training_is_not_changed(spec: str) -> None:
    """Scaled residuals against unscaled, clipped gradients would look large; a threshold that sends nothing is fine."""
    assert run_ranks(quiet, 2, spec) == [0, 0]


def test_a_negative_interval_is_an_error() -> None:
    (text,) = run_ranks(negative, 1)
    assert text == "sentinel is -1: use a number of steps, or 0 for never"


def negative(rank: int, world: int) -> str:
    try:
        build("none", sentinel=-1)
    except UsageError as error:
        return str(error)
    return ""
