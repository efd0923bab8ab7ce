"""Codec state is kept for another plan, another codec and another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loops.models import wide_mlp

import syncline
from ranks import run_ranks
from syncline import codecs, plan

SPEC = "powersgd(rank=2)"
LR = 0.05


def attached(rank: int, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = wide_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return model, optimizer, syncline.attach(model, optimizer, **options)


def steps(rank: int, model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 10 + rank))
        (model(x) - x[:, :10]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: Any) -> list[float]:
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


def save(rank: int, world: int, folder: str) -> None:
    model, optimizer, sync = attached(rank, compress=SPEC)
    steps(rank, model, optimizer, 0, 5)
    torch.save({"sync": sync.state_dict(), "model": model.state_dict()}, Path(folder) / f"{rank}.pt")
    sync.close()


def fine(model: Any, codec: str) -> plan.Plan:
    shapes = [plan.Shape(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()]
    return plan.default_plan(shapes, compress=codec, group_bytes=0, part_bytes=16 << 10)


def load(rank: int, world: int, folder: str, old: int, codec: str) -> dict[str, Any]:
    files = [torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in range(old)]
    states = [f["sync"] for f in files]
    mine = states[rank] if world == old else codecs.reshard(states, world, keep="mean")[rank]
    torch.manual_seed(0)
    model = wide_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = syncline.attach(model, optimizer, plan=fine(model, codec))
    model.load_state_dict(files[0]["model"])
    sync.load_state_dict(mine)
    assert sync.step == 5
    kept = {n: t for n, t in sync.state_dict().items() if n.endswith(".error")}
    assert {n for n in mine if n.endswith(".error")} == set(kept)
    same = all(torch.equal(kept[n].flatten(), mine[n].flatten()) for n in kept)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    # A gradient of zero: what moves is what was owed.
    sum((p * 0).sum() for p in model.parameters()).backward()
    optimizer.step()
    owed = {n: torch.stack([s[f"{n}.error"] for s in states]).mean(0) for n in before if f"{n}.error" in states[0]}
    paid = {n: (before[n] - model.get_parameter(n).detach()) / LR for n in owed}
    error = max(float((paid[n] - owed[n].view_as(paid[n])).abs().max()) for n in owed)
    size = max(float(o.abs().max()) for o in owed.values())
    optimizer.zero_grad()
    steps(rank, model, optimizer, 6, 10)
    values = flat(model)
    sync.close()
    return {"same": same, "error": error, "size": size, "values": values}


@pytest.mark.parametrize(("old", "new"), [pytest.param(3, 3, marks=pytest.mark.full), (4, 2), (2, 3)])
def test_state_is_carried_to_another_plan_codec_and_world_size(old: int, new: int, tmp_path: Path) -> None:
    run_ranks(save, old, str(tmp_path))
    for codec in ("none", SPEC):
        ranks = run_ranks(load, new, str(tmp_path), old, codec)
        for found in ranks:
            assert found["same"], "residuals arrive as they were, in another plan"
            assert found["values"] == ranks[0]["values"], "replicas are equal"
            assert found["size"] > 1e-4, "something was owed"
            if codec == "none":
                assert found["error"] < 1e-6 + 1e-3 * found["size"], "dense pays the mean of what the ranks owed"
