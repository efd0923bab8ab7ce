"""A model that is attached and wrapped at once, attached twice, or changed after attach: one sentence each."""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def attached(net: nn.Module) -> tuple[syncline.Sync, torch.optim.Optimizer]:
    optimizer = sgd(net)
    return syncline.attach(net, optimizer), optimizer


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    for step in range(3):
        net(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(v) for p in net.parameters() for v in p.detach().flatten()]


def message(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call says in its error, or else what it returns."""
    try:
        return function(*args, **kwargs)
    except UsageError as error:
        return str(error)


# -- wrappers


def wrapped_with_hook(net: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(*syncline.ddp_hook("powersgd(rank=2)"))
    return wrapped


def wrapped_by_fsdp(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net, device_id=torch.device("cpu"))


def sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return net


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "ddp_hook": wrapped_with_hook,
    "DataParallel": DataParallel,
    "FullyShardedDataParallel": wrapped_by_fsdp,
    "fully_shard": sharded,
    "DeepSpeedEngine": DeepSpeedEngine,
    "our DistributedDataParallel": syncline.DistributedDataParallel,
}


def train_wrapped(wrap: Callable[[nn.Module], nn.Module], net: nn.Module, optimizer: Any, rank: int) -> None:
    """Wrap a model that is attached, wholly or in part, and train it."""
    steps(wrap(net), optimizer, rank)


def both_orders(rank: int, world: int) -> dict[str, str]:
    said, alive = {}, []
    for name, wrap in WRAPPERS.items():
        if name == "DeepSpeedEngine":
            # A reason to search for wrappers, which is expensive.
            sys.modules["deepspeed"] = types.ModuleType("deepspeed")
        inner = model()
        alive.append((inner, wrapped := wrap(inner)))
        said[f"attach({name})"] = message(syncline.attach, wrapped, compress="powersgd(rank=2)")
        # On a CPU, DataParallel calls its module directly, which is right.
        if name != "DataParallel":
            said[f"attach(part of {name})"] = message(syncline.attach, inner[0])
        net = model()
        sync, optimizer = attached(net)
        said[f"{name}(attached)"] = message(train_wrapped, wrap, net, optimizer, rank)
        sync.close()
        parent = nn.Sequential(model(), nn.Linear(2, 2))
        sync, optimizer = attached(parent[0])
        said[f"{name}(parent of attached)"] = message(train_wrapped, wrap, parent, optimizer, rank)
        sync.close()
    del sys.modules["deepspeed"]
    net = model()
    said["Horovod"] = message(syncline.attach, net, HorovodSGD(net.parameters(), lr=0.1))
    return said


def test_attach_and_another_wrapper_is_refused_in_both_orders() -> None:
    for said in run_ranks(both_orders, 2):
        assert "Horovod's DistributedOptimizer, which averages gradients, too" in said.pop("Horovod")
        ours = said.pop("attach(part of our DistributedDataParallel)")
        assert ours.startswith("parameter 'weight' belongs to another attached model")
        for what, text in said.items():
            before = what.startswith(("attach(", "fully_shard", "Fully"))  # FSDP is noticed in the first backward pass
            expected = "the model is wrapped in" if before else "the model is attached, and"
            assert isinstance(text, str), what
            assert text.startswith(expected), f"{what}: {text}"
        assert said["attach(DistributedDataParallel)"] == said["attach(part of ddp_hook)"] == said["attach(ddp_hook)"]
        assert said["attach(ddp_hook)"] == (
            "the model is wrapped in DistributedDataParallel, which synchronises it, too: attach the plain model, or"
            " keep DDP and call ddp_model.register_comm_hook(*syncline.ddp_hook(codec))"
        )
        assert "deepspeed's DeepSpeedEngine" in said["attach(part of DeepSpeedEngine)"]


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
        sync, optimizer = attached(net)
        found.append(steps(net, optimizer, rank))
        sync.close()
    sync, _ = attached(net)
    sync.close()
    DistributedDataParallel(net)  # closed: wrapped without a word
    return found


def test_a_model_whose_wrapper_is_gone_can_be_attached() -> None:
    first, second = run_ranks(after_the_wrapper, 2)
    assert first == second
    assert first[0] == first[1] == first[2]


# -- two engines


def twice(rank: int, world: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    net = model()
    sync, optimizer = attached(net)
    said["same"] = message(syncline.attach, net, optimizer)
    said["same, other optimizer"] = message(syncline.attach, net, sgd(net))
    said["same, no optimizer"] = message(syncline.attach, net)
    said["child"] = message(syncline.attach, net[0], sgd(net[0]))
    said["parent"] = message(syncline.attach, nn.Sequential(net, model()))
    said["shared"] = message(syncline.attach, nn.ModuleDict({"trunk": net[0], "head": nn.Linear(6, 1)}))
    said["still"] = steps(net, optimizer, rank)
    sync.close()
    sync = syncline.attach(net, optimizer)
    said["again"] = steps(net, optimizer, rank)
    sync.close()

    # A frozen module in two models is nobody's; when it is unfrozen, it would have two engines.
    trunk = nn.Linear(4, 6).requires_grad_(False)
    first, second = nn.Sequential(trunk, nn.Linear(6, 2)), nn.Sequential(trunk, nn.Linear(6, 2))
    (first_sync, first_optimizer), (second_sync, second_optimizer) = attached(first), attached(second)
    said["frozen trunk"] = steps(first, first_optimizer, rank) + steps(second, second_optimizer, rank)
    trunk.requires_grad_(True)
    said["unfrozen trunk"] = message(steps, first, first_optimizer, rank)
    first_sync.close()
    second_sync.close()

    # What the sentence advises works: one engine over both models, an optimizer for each.
    trunk = nn.Linear(4, 6)
    first, second = nn.Sequential(trunk, nn.Linear(6, 2)), nn.Sequential(trunk, nn.Linear(6, 2))
    optimizers = [sgd(first), sgd(second)]
    sync = syncline.attach(nn.ModuleList([first, second]), optimizers)
    said["one engine"] = steps(first, optimizers[0], rank) + steps(second, optimizers[1], rank)
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
    assert first["unfrozen trunk"].startswith("parameter '0.weight' belongs to another attached model")
    for works in ("still", "again", "frozen trunk", "one engine"):
        assert isinstance(first[works], list), first[works]


# -- other parameters after attach


def new_module(net: nn.Sequential) -> None:
    net.append(nn.Linear(2, 2))


def one_replaced(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())


def all_replaced(net: nn.Sequential) -> None:
    net.load_state_dict({name: tensor.clone() for name, tensor in net.state_dict().items()}, assign=True)


CHANGES: dict[str, Any] = {"3": new_module, "0": one_replaced, "0, all": all_replaced}


def changed(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import gives a warning of torch

    said: dict[str, Any] = {}
    for what, change in CHANGES.items():
        for new_optimizer in (False, True):
            net = model()
            sync, optimizer = attached(net)
            steps(net, optimizer, rank)
            change(net)
            said[f"{what}, {new_optimizer}"] = message(steps, net, sgd(net) if new_optimizer else optimizer, rank)
            sync.close()
    for what in ("dtype", "shape"):
        net = model()
        sync, _ = attached(net)
        net[2].weight.data = torch.ones(2, 6).double() if what == "dtype" else torch.ones(3, 6)
        loss = torch.stack([p.double().square().sum() for p in net.parameters()]).sum()
        said[what] = message(loss.backward)
        sync.close(reuse_groups=False)
    # An optimizer inside another one is a part of it.
    said["optimizers"] = []
    for sharded_optimizer in (False, True):
        net = model()
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1) if sharded_optimizer else sgd(net)
        sync = syncline.attach(net, zero)
        said["optimizers"].append(steps(net, zero, rank))
        sync.close()
    net = model()
    sync, optimizer = attached(net)
    steps(net, optimizer, rank)
    # These keep the parameters' objects, or bring none that train.
    nn.utils.parametrize.register_parametrization(net[2], "weight", nn.Tanh())
    net.append(nn.Linear(2, 2).requires_grad_(False))
    said["kept"] = steps(net, optimizer, rank)
    sync.close()
    return said


def test_parameters_that_came_after_attach_are_refused() -> None:
    for said in run_ranks(changed, 2):
        assert isinstance(said.pop("kept"), list)
        assert said.pop("dtype").startswith("'0.weight' and '2.weight' are sent together, as torch.float32 and torch.f")
        assert said.pop("shape").startswith("'2.weight' is (3, 6) and was (2, 6) at attach: call close()")
        plain, zero = said.pop("optimizers")
        assert plain == zero
        assert len(said) == 2 * len(CHANGES)
        for what, text in said.items():
            start = f"parameter '{what[0]}.weight' is not the one that was attached"
            assert isinstance(text, str), what
            assert text.startswith(start), f"{what}: {text}"


# -- what cannot be attached


def refused_at_attach(rank: int, world: int) -> dict[str, str]:
    said = {}
    with torch.inference_mode():
        said["inference mode"] = message(syncline.attach, model())
        inference = model()
    said["made under inference mode"] = message(syncline.attach, inference)
    said["meta"] = message(syncline.attach, nn.Linear(2, 2, device="meta"))
    said["lazy"] = message(syncline.attach, nn.Sequential(nn.LazyLinear(2)))
    said["frozen"] = message(syncline.attach, model().requires_grad_(False))
    said["empty"] = message(syncline.attach, nn.ReLU())
    group, mesh = dist.new_group([0]), DeviceMesh("cpu", [0])
    if rank == 1:
        said["group"] = message(syncline.attach, model(), process_group=group)
        said["mesh"] = message(syncline.attach, model(), process_group=mesh)
    return said


def test_models_and_groups_that_cannot_be_attached() -> None:
    said = run_ranks(refused_at_attach, 2)[1]
    assert said["inference mode"].startswith("attach was called under torch.inference_mode")
    assert said["made under inference mode"].startswith("parameter '0.weight' was made under torch.inference_mode")
    assert said["meta"].startswith("the model is on 'meta'")
    assert said["lazy"].startswith("parameter '0.weight' has no shape yet")
    assert said["frozen"] == said["empty"] == "no parameter of the model requires a gradient: there is nothing to train"
    assert said["group"] == said["mesh"]
    assert said["group"].startswith("this rank is not a member of the process group")


def different(rank: int, world: int) -> dict[str, str]:
    said = {}
    said["shape"] = message(syncline.attach, nn.Linear(4, 2 + rank))
    said["name"] = message(syncline.attach, nn.ModuleDict({f"layer{rank}": nn.Linear(4, 2)}))
    net = model()
    net[0].requires_grad_(rank == 0)
    said["frozen"] = message(syncline.attach, net)
    said["more"] = message(syncline.attach, nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]))
    said["codec"] = message(syncline.attach, model(), compress=["bf16", "int8"][rank])
    said["exchange"] = message(syncline.attach, model(), exchange=["ring", "allreduce"][rank])
    said["seed"] = message(syncline.attach, model(), seed=rank)
    said["tune"] = message(syncline.attach, model(), tune=rank == 0)
    said["buffers"] = message(syncline.attach, nn.Sequential(model(), nn.BatchNorm1d(2)), buffers=rank == 0)
    return said


def test_ranks_that_attach_differently_name_the_difference() -> None:
    models, plans, options = (
        f"{what} differ between the ranks: rank 1 has"
        for what in ("the models' parameters", "plans", "attach's options")
    )
    for said in run_ranks(different, 2):
        assert said == {
            "shape": f"{models} 'weight: (3, 4) torch.float32', and rank 0 has 'weight: (2, 4) torch.float32'",
            "name": f"{models} 'layer1.weight: (2, 4) torch.float32', and rank 0 has 'layer0.weight: (2, 4)"
            " torch.float32'",
            "frozen": f"{models} '0.weight: (6, 4) torch.float32, frozen', and rank 0 has '0.weight: (6, 4)"
            " torch.float32'",
            "more": f"{models} '1.weight: (2, 2) torch.float32', and rank 0 has nothing in its place",
            "codec": f"{plans} 'unit 0..2: int8 over allgather, partitions 1', and rank 0 has 'unit 0..2: bf16 over"
            " allreduce, partitions 1'",
            "exchange": f"{plans} 'unit 0..2: none over allreduce, partitions 1', and rank 0 has 'unit 0..2: none over"
            " ring, partitions 1'",
            "seed": f"{options} 'seed: 1', and rank 0 has 'seed: 0'",
            "tune": f"{options} 'tune: None', and rank 0 has 'tune: order'",
            "buffers": f"{options} 'buffers: 0', and rank 0 has 'buffers: 3'",
        }
