"""A model that is attached and wrapped at once, attached twice, or changed after attach: one sentence each."""

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import syncline
from ranks import run_ranks
from syncline.errors import UsageError


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's engine, which is not installed here."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class HorovodSGD(torch.optim.SGD):
    """As Horovod makes its DistributedOptimizer: a class of the optimizer's own name."""

    __module__ = "horovod.torch.optimizer"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    for step in range(3):
        net(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(v) for p in net.parameters() for v in p.detach().flatten()]


def attached(net: nn.Module, rank: int, **options: Any) -> tuple[syncline.Sync, torch.optim.Optimizer]:
    optimizer = sgd(net)
    return syncline.attach(net, optimizer, **options), optimizer


def inner_of(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = model()
    net.wrapped_for_test = [wrap(net)]  # type: ignore[assignment]  # alive, and no module of it
    return net


def wrapped_in_hook(net: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(*syncline.ddp_hook("powersgd(rank=2)"))
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "ddp_hook": wrapped_in_hook,
    "DataParallel": DataParallel,
    "FullyShardedDataParallel": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
    "fully_shard": lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (2,))),
    "DeepSpeedEngine": DeepSpeedEngine,
    "syncline's DistributedDataParallel": syncline.DistributedDataParallel,
}


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "nothing was said"


def both_orders(rank: int, world: int) -> dict[str, str]:
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    said = {}
    for name, wrap in WRAPPERS.items():
        said[f"attach({name})"] = message(lambda: syncline.attach(wrap(model()), compress="powersgd(rank=2)"))
        said[f"attach(inner of {name})"] = message(lambda: syncline.attach(inner_of(wrap)))
        said[f"attach(part of {name})"] = message(lambda: syncline.attach(inner_of(wrap)[0]))
        net = model()
        sync, optimizer = attached(net, rank)
        said[f"{name}(attached)"] = message(lambda: steps(wrap(net), optimizer, rank))
        sync.close()
        parent = nn.Sequential(model(), nn.Linear(2, 2))
        sync, optimizer = attached(parent[0], rank)
        said[f"{name}(parent of attached)"] = message(lambda: steps(wrap(parent), optimizer, rank))
        sync.close()
        gc.collect()
    net = model()
    said["Horovod"] = message(lambda: syncline.attach(net, HorovodSGD(net.parameters(), lr=0.1)))
    return said


def test_attach_and_another_wrapper_is_refused_in_both_orders() -> None:
    for said in run_ranks(both_orders, 2):
        assert "Horovod's DistributedOptimizer, which averages gradients, too" in said.pop("Horovod")
        for what, text in said.items():
            assert "too:" in text or "again:" in text or "attached already" in text, f"{what}: {text}"
        assert said["attach(DistributedDataParallel)"] == said["attach(inner of ddp_hook)"] == (
            "the model is wrapped in DistributedDataParallel, which synchronises it, too: attach the plain model, or keep"
            " DDP and call ddp_model.register_comm_hook(*syncline.ddp_hook(codec))"
        )
        assert "is attached, and DataParallel around it" in said["DataParallel(attached)"]
        assert "deepspeed's DeepSpeedEngine" in said["attach(inner of DeepSpeedEngine)"]


def after_the_wrapper(rank: int, world: int) -> list[list[float]]:
    """A model that was wrapped once, and is not any more, is a plain model."""
    found = []
    for wrap in (None, DistributedDataParallel, syncline.DistributedDataParallel):
        net = model()
        if wrap is not None:
            wrapped = wrap(net)
            wrapped(torch.ones(2, 4)).sum().backward()
            net.zero_grad()
            if isinstance(wrapped, syncline.DistributedDataParallel):
                wrapped.close()
            del wrapped
        sync, optimizer = attached(net, rank)
        found.append(steps(net, optimizer, rank))
        sync.close()
    return found


def test_a_model_whose_wrapper_is_gone_can_be_attached() -> None:
    first, second = run_ranks(after_the_wrapper, 2)
    assert first == second
    assert first[0] == first[1] == first[2]


def twice(rank: int, world: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    net = model()
    sync, optimizer = attached(net, rank)
    said["same"] = message(lambda: syncline.attach(net, optimizer))
    said["same, other optimizer"] = message(lambda: syncline.attach(net, sgd(net)))
    said["same, no optimizer"] = message(lambda: syncline.attach(net))
    said["child"] = message(lambda: syncline.attach(net[0], sgd(net[0])))
    said["parent"] = message(lambda: syncline.attach(nn.Sequential(net, model())))
    said["shared"] = message(lambda: syncline.attach(nn.ModuleDict({"trunk": net[0], "head": nn.Linear(6, 1)})))
    said["wrapper"] = message(lambda: syncline.DistributedDataParallel(net))
    said["still"] = steps(net, optimizer, rank)
    sync.close()
    sync = syncline.attach(net, optimizer)
    said["again"] = steps(net, optimizer, rank)
    sync.close()

    first, second = model(), model()
    both = sgd(first, second)
    sync = syncline.attach(first, both)
    said["optimizer of two, then the second"] = message(lambda: syncline.attach(second))
    sync.close()
    sync, _ = attached(second, rank)
    said["the second, then an optimizer of two"] = message(lambda: syncline.attach(first, both))
    sync.close()

    # One frozen module in two models is nobody's; when it is unfrozen, it has two engines.
    trunk = nn.Linear(4, 6).requires_grad_(False)
    first, second = nn.Sequential(trunk, nn.Linear(6, 2)), nn.Sequential(trunk, nn.Linear(6, 2))
    syncs = [attached(first, rank), attached(second, rank)]
    said["frozen trunk"] = steps(first, syncs[0][1], rank) + steps(second, syncs[1][1], rank)
    trunk.requires_grad_(True)
    said["unfrozen trunk"] = message(lambda: steps(first, syncs[0][1], rank))
    for sync, _ in syncs:
        sync.close()

    # What the sentences advise works: one engine over both models, an optimizer for each.
    trunk = nn.Linear(4, 6)
    first, second = nn.Sequential(trunk, nn.Linear(6, 2)), nn.Sequential(trunk, nn.Linear(6, 2))
    first_optimizer, second_optimizer = sgd(first), sgd(second)
    sync = syncline.attach(nn.ModuleList([first, second]), [first_optimizer, second_optimizer])
    said["one engine"] = steps(first, first_optimizer, rank) + steps(second, second_optimizer, rank)
    sync.close()
    return said


def test_a_parameter_has_one_engine() -> None:
    first, second = run_ranks(twice, 2)
    assert first == second
    again = "this model is attached already: close() the first attachment before attaching again"
    assert first["same"] == first["same, other optimizer"] == first["same, no optimizer"] == again
    assert first["child"].startswith("parameter 'weight' belongs to another attached model (there it is '0.weight')")
    assert first["parent"].startswith("parameter '0.0.weight' belongs to another attached model")
    assert first["shared"].startswith("parameter 'trunk.weight' belongs to another attached model")
    assert "is attached, and syncline's DistributedDataParallel around it would synchronise it" in first["wrapper"]
    assert len(first["still"]) == len(first["again"]) == 44
    assert first["still"] != first["again"]
    assert "is in an optimizer of another attached model" in first["optimizer of two, then the second"]
    assert "holds parameters of two attached models" in first["the second, then an optimizer of two"]
    assert first["unfrozen trunk"].startswith("parameter '0.weight' belongs to another attached model")
    assert isinstance(first["frozen trunk"], list)
    assert isinstance(first["one engine"], list)


def changed(rank: int, world: int) -> dict[str, str]:
    said = {}

    def new_module(net: nn.Sequential) -> None:
        net.append(nn.Linear(2, 2))

    def replaced(net: nn.Sequential) -> None:
        net[0].weight = nn.Parameter(net[0].weight.detach().clone())

    def all_replaced(net: nn.Sequential) -> None:
        net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()}, assign=True)

    def sharded(net: nn.Sequential) -> None:
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))

    for change in (new_module, replaced, all_replaced, sharded):
        net = model()
        sync, optimizer = attached(net, rank)
        steps(net, optimizer, rank)
        change(net)
        said[change.__name__] = message(lambda: steps(net, sgd(net), rank))
        if change.__name__ in ("all_replaced", "sharded"):  # no gradient comes to the engine: its optimizer's step says it
            assert said[change.__name__] == "nothing was said"
            said[change.__name__] = message(optimizer.step)
        sync.close()

    # These keep the parameters' objects.
    net = model()
    sync, optimizer = attached(net, rank)
    steps(net, optimizer, rank)
    nn.utils.parametrizations.weight_norm(net[2])
    net.register_module("activation", nn.Tanh())
    said["frozen module"] = message(lambda: net.register_module("table", nn.Embedding(3, 2).requires_grad_(False)))
    sync.close()
    return said


def test_parameters_that_came_after_attach_are_refused() -> None:
    for said in run_ranks(changed, 2):
        for what, name in {"new_module": "3.weight", "replaced": "0.weight", "all_replaced": "0.weight"}.items():
            assert said[what].startswith(f"parameter '{name}' is not the one that was attached"), said
        assert "FSDP" in said["sharded"], said


def refused_at_attach(rank: int, world: int) -> dict[str, str]:
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    said = {}
    with torch.inference_mode():
        said["inference mode"] = message(lambda: syncline.attach(model()))
        inference = model()
    said["made under inference mode"] = message(lambda: syncline.attach(inference))
    said["meta"] = message(lambda: syncline.attach(nn.Linear(2, 2, device="meta")))
    said["lazy"] = message(lambda: syncline.attach(nn.Sequential(nn.LazyLinear(2))))
    said["frozen"] = message(lambda: syncline.attach(model().requires_grad_(False)))
    said["empty"] = message(lambda: syncline.attach(nn.ReLU()))
    only_0 = dist.new_group([0])
    if rank == 1:
        said["group"] = message(lambda: syncline.attach(model(), process_group=only_0))
        said["mesh"] = message(lambda: syncline.attach(model(), process_group=DeviceMesh("cpu", [0])))
    else:
        DeviceMesh("cpu", [0])
    return said


def test_models_and_groups_that_cannot_be_attached() -> None:
    said = run_ranks(refused_at_attach, 2)[1]
    assert "under torch.inference_mode: call it outside" in said["inference mode"]
    assert "'0.weight' was made under torch.inference_mode" in said["made under inference mode"]
    assert "the model is on 'meta'" in said["meta"]
    assert "'0.weight' has no shape yet: call the model once" in said["lazy"]
    assert said["frozen"] == said["empty"] == "no parameter of the model requires a gradient: there is nothing to train"
    assert said["group"] == said["mesh"]
    assert said["group"].startswith("this rank is not a member of the process group")


def different(rank: int, world: int) -> dict[str, str]:
    said = {}
    said["shape"] = message(lambda: syncline.attach(nn.Linear(4, 2 + rank)))
    said["name"] = message(lambda: syncline.attach(nn.ModuleDict({f"layer{rank}": nn.Linear(4, 2)})))
    net = model()
    net[0].requires_grad_(rank == 0)
    said["frozen"] = message(lambda: syncline.attach(net))
    said["more"] = message(lambda: syncline.attach(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)])))
    said["codec"] = message(lambda: syncline.attach(model(), compress=["bf16", "int8"][rank]))
    said["exchange"] = message(lambda: syncline.attach(model(), exchange=["ring", "allreduce"][rank]))
    said["seed"] = message(lambda: syncline.attach(model(), seed=rank))
    said["sentinel"] = message(lambda: syncline.attach(model(), sentinel=rank))
    said["tune"] = message(lambda: syncline.attach(model(), tune=rank == 0))
    said["buffers"] = message(lambda: syncline.attach(nn.Sequential(model(), nn.BatchNorm1d(2)), buffers=rank == 0))
    return said


def test_ranks_that_attach_differently_name_the_difference() -> None:
    for said in run_ranks(different, 2):
        assert said == {
            "shape": "the models' parameters differ between the ranks: rank 1 has 'weight (3, 4) float32' and rank 0"
            " 'weight (2, 4) float32'",
            "name": "the models' parameters differ between the ranks: rank 1 has 'layer1.weight (2, 4) float32' and rank 0"
            " 'layer0.weight (2, 4) float32'",
            "frozen": "the models' parameters differ between the ranks: rank 1 has '0.weight (6, 4) float32 frozen' and"
            " rank 0 '0.weight (6, 4) float32'",
            "more": "the models' parameters differ between the ranks: rank 1 has '1.weight (2, 2) float32' and rank 0 none",
            "codec": "",
        }


if __name__ == "__main__":
    pytest.main([__file__])
