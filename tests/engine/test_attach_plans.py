"""`attach` with a plan: from a file, with frozen parameters, and refused with `compress="auto"`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline import exchange, plan
from syncline.errors import UsageError

PARTS = 4
LR = 0.05


def small() -> nn.Sequential:
    """The last bias has fewer values than the unit has parts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def one_unit(model: nn.Module, *, codec: str = "none", partitions: int = PARTS) -> plan.Plan:
    names = tuple(name for name, _ in model.named_parameters())
    unit = plan.Unit("all", names, codec, exchange.legal(codec)[0], partitions)
    return plan.Plan((unit,), tuple(("all", part) for part in reversed(range(partitions))))


def values(model: nn.Module) -> list[float]:
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step * 10 + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def mostly_frozen(rank: int, world: int, codec: str, partitions: int) -> dict[str, Any]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = syncline.attach(model, optimizer, plan=one_unit(model, codec=codec, partitions=partitions))
    train(rank, model, optimizer, 0, 3)
    owed = {name: t for name, t in sync.state_dict().items() if name.endswith(".error")}
    last_bias = model[2].bias
    model.requires_grad_(False)
    last_bias.requires_grad_(True)
    before = values(model)
    train(rank, model, optimizer, 3, 6)
    launches = [len(unit.launches) for unit in sync.units]
    moved = [a != b for a, b in zip(before, values(model), strict=True)]
    kept = sync.state_dict()
    same = all(torch.equal(kept[name], owed[name]) for name in owed if not name.startswith("2.bias"))
    model.requires_grad_(True)
    train(rank, model, optimizer, 6, 9)
    seen = {"values": values(model), "launches": launches, "moved": moved, "owed": sorted(owed), "same": same}
    sync.close()
    return seen


def test_a_unit_with_fewer_trained_values_than_parts() -> None:
    cut, whole = (run_ranks(mostly_frozen, 2, "none", partitions) for partitions in (PARTS, 1))
    for seen in cut:
        assert seen["launches"] == [3], "a part a value"
        assert seen["moved"] == [False] * (len(seen["moved"]) - 3) + [True] * 3
        assert seen["values"] == whole[0]["values"], "bit for bit, cut or not"


def test_residuals_of_frozen_parameters_are_kept() -> None:
    first, second = run_ranks(mostly_frozen, 2, "topk(0.2)", PARTS)
    assert first["values"] == second["values"]
    for seen in (first, second):
        assert seen["owed"] == ["0.bias.error", "0.weight.error", "2.bias.error", "2.weight.error"]
        assert seen["same"], "the residuals of what is frozen stay as they are"


def from_a_file(rank: int, world: int, path: str) -> dict[str, Any]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = syncline.attach(model, optimizer, plan=path)
    train(rank, model, optimizer, 0, 8)
    seen = {"hash": sync.plan.hash, "order": [launch.part for launch in sync._running.order], "values": values(model)}
    assert sync.auto is None, "a given plan is not tuned"
    sync.close()
    return seen


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    path, made = tmp_path / "plan.toml", one_unit(small(), codec="int8")
    plan.save(made, path)
    first, second = run_ranks(from_a_file, 2, str(path))
    assert first == second
    assert first["hash"] == made.hash
    assert first["order"] == [3, 2, 1, 0], "as the file has it"


def refused(rank: int, world: int, options: dict[str, Any]) -> str:
    model, other = small(), small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    given = {
        "nothing": None,
        "an optimizer": optimizer,
        "another model's": torch.optim.SGD(other.parameters(), lr=LR),
        "a scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    options = {"model": model, "optimizer": "an optimizer"} | options
    for name in ("model", "optimizer"):
        value = options[name]
        options[name] = given.get(value, value) if isinstance(value, str) else value
    with pytest.raises(UsageError) as caught:
        syncline.attach(options.pop("model"), options.pop("optimizer"), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compress": "auto", "plan": "plan.toml"}, "leave compress out, or the plan"),
        ({"compress": "auto(int8)", "plan": "plan.toml"}, "leave compress out, or the plan"),
        ({"compress": "auto", "exchange": "ring"}, "'ring' was given: leave exchange out, or name a codec"),
        ({"compress": "int8", "plan": "plan.toml"}, "leave compress and exchange out"),
        ({"compress": 4}, "compress is 4: give a string"),
        ({"exchange": ["ring"]}, "exchange is ['ring']: give a string"),
        ({"model": "an optimizer"}, "model is a SGD: give a torch Module"),
        ({"model": "nothing"}, "model is a NoneType: give a torch Module"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd': give a torch Optimizer, or a list of them"),
        ({"optimizer": "a scheduler"}, "StepLR"),
        ({"optimizer": "another model's"}, "the optimizer has none of the model's parameters"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    # One rank alone chooses nothing, and must not hide the mistake.
    (text,) = run_ranks(refused, 1, options)
    assert says in text
    assert "\n" not in text


def described(rank: int, world: int) -> list[str]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = syncline.attach(model, optimizer, plan=one_unit(model, codec="bf16"))
    texts = [repr(sync)]
    train(rank, model, optimizer, 0, 1)
    texts.append(repr(sync))
    sync.close()
    return [*texts, repr(sync)]


def test_the_engine_describes_itself() -> None:
    fresh, stepped, closed = run_ranks(described, 2)[0]
    begin = "<Sync of Sequential on rank 0 of 2: 1 unit, bf16; step"
    assert fresh == f"{begin} 0; nothing is in flight, and no averaged gradients wait for a step>"
    assert stepped.startswith(f"{begin} 1; ")
    assert closed == f"{begin} 1; the engine is closed>"
