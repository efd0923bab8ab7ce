"""Every codec through the engine gives what lockstep gives from the same local gradients: parameters and state.

To the bit, but over all-reduce, where the backend adds in an order of its own: then to rounding.
"""

import io
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "codecs"))
from codec_table import SPECS
from loops.run_rows import guarded

import syncline
from ranks import run_ranks
from syncline import exchange, plan

WORLD, STEPS, LR, SMALL = 3, 5, 0.1, 16384
OVER = " over "
ROWS = [
    *SPECS,
    *(f"{spec}{OVER}hierarchical(node=2)" for spec in ("none", "bf16", "int8", "topk(0.1)", "powersgd(rank=2)")),
    *(f"int8{OVER}{name}" for name in ("server(servers=2)", "hierarchical(node=1)")),
]
"""Codecs over their default exchanges, and some over others."""


def model() -> nn.Sequential:
    # A convolution, a matrix above `small`, two equal matrices, biases.
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10),
    )  # fmt: skip


def train(spec: str, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """What this rank had and did: units, local gradients of every step, final parameters and codec state."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    shapes = [plan.Shape(name, tuple(p.shape), p.dtype) for name, p in net.named_parameters()]
    # The convolution is a unit, the large matrix, and the small ones together.
    codec, _, carrier = spec.partition(OVER)
    rows = plan.default_plan(shapes, compress=codec, exchange=carrier or None, group_bytes=64 << 10)
    sync = syncline.attach(net, optimizer, plan=rows, process_group=group)
    grads: list[dict[str, Tensor]] = [{} for _ in range(STEPS)]
    for step in range(STEPS):
        # These hooks see a gradient before it is accumulated: this rank's own.
        hooks = [p.register_hook(partial(_keep, grads[step], name)) for name, p in net.named_parameters()]
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(6, 3, 8, 8, generator=generator), torch.randn(6, 10, generator=generator)
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
    units = [(list(u.parameters), str(u.codec), str(u.exchange), u.partitions) for u in sync.plan.units]
    parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
    state = {key: tensor.clone() for key, tensor in sync.state_dict().items()}
    sync.close()
    return {"units": units, "grads": grads, "parameters": parameters, "state": state}


def _keep(kept: dict[str, Tensor], name: str, grad: Tensor) -> None:
    kept[name] = grad.detach().clone()


def every_spec(rank: int, world: int, specs: list[str]) -> tuple[dict[str, str | None], bytes]:
    """All specs on this rank; saved, because tensors would outlive the process that sends."""
    done: dict[str, Any] = {}

    def one(spec: str, group: dist.ProcessGroup) -> None:
        done[spec] = train(spec, rank, group)

    problems = guarded(specs, one)
    file = io.BytesIO()
    torch.save(done, file)
    return problems, file.getvalue()


@cache
def ranks(specs: tuple[str, ...]) -> tuple[dict[str, str | None], list[dict[str, Any]]]:
    results = run_ranks(every_spec, WORLD, list(specs), timeout=110)
    return results[0][0], [torch.load(io.BytesIO(data), weights_only=True) for _, data in results]


def reference(did: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters and every rank's state after all steps, in one process."""
    parameters = {name: p.detach().clone() for name, p in model().named_parameters()}
    states: list[dict[str, Tensor]] = [{} for _ in range(WORLD)]
    for names, codec, carrier, partitions in did[0]["units"]:
        assert partitions == 1, f"unit {names} is cut: this model is meant to have none such"
        kept: list[dict[str, Tensor]] = [{} for _ in range(WORLD)]
        for step in range(STEPS):
            grads = [[d["grads"][step][name] for name in names] for d in did]
            done = exchange.lockstep(
                codec, grads, exchange=carrier, names=names, states=kept, first_step=step, seed=0, small=SMALL
            )
            kept = done.states
            for name, mean in zip(names, done.outputs[0], strict=True):
                parameters[name].add_(mean, alpha=-LR)
        for state, more in zip(states, kept, strict=True):
            state.update(more)
    return parameters, states


@pytest.mark.parametrize("spec", ROWS)
def test_engine_is_lockstep(spec: str, request: pytest.FixtureRequest) -> None:
    # All chosen specs run together, at the first of them.
    items = [item for item in request.session.items if item.originalname == request.node.originalname]
    problems, did_all = ranks(tuple(item.callspec.params["spec"] for item in items))
    if problems[spec]:
        pytest.fail(str(problems[spec]), pytrace=False)
    did = [d[spec] for d in did_all]
    units = did[0]["units"]
    assert sorted(name for names, *_ in units for name in names) == sorted(dict(model().named_parameters()))
    assert all(d["units"] == units for d in did)
    tolerance = 0.0
    if any(carrier == "allreduce" for _, _, carrier, _ in units):
        tolerance = 2e-2 if "16" in spec else 1e-4
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    parameters, states = reference(did)
    for rank, (mine, state) in enumerate(zip(did, states, strict=True)):
        for name, tensor in mine["parameters"].items():
            assert torch.equal(tensor, did[0]["parameters"][name]), f"ranks 0 and {rank} differ in {name}"
            close(tensor, parameters[name], msg=partial("{}, rank {}: {}".format, name, rank))
        of_parameters = {key for key in mine["state"] if key.rpartition(".")[0] in parameters}
        assert of_parameters == state.keys(), f"rank {rank}"
        for key, tensor in state.items():
            close(mine["state"][key], tensor, msg=partial("{}, rank {}: {}".format, key, rank))
