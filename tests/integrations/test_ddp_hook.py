"""`syncline.ddp_hook` on torch's DDP: dense matches DDP bit for bit, codecs match lockstep, state is kept."""

import copy
import gc
import io
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import syncline
from ranks import run_ranks
from syncline import exchange
from syncline.errors import UsageError

LR, STEPS, SMALL = 0.1, 5, 16384
SPECS = ["powersgd(rank=4)", "acpsgd(rank=4) | bf16", "topk(0.05)", "int8", "dgc(0.05)", "topk(0.1) | int8"]


class Net(nn.Module):
    """Several buckets of 0.1 MB; `some` is used on odd ranks only, `never` by nobody."""

    def __init__(self, rank: int, *, unused: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.hidden, self.more, self.last = nn.Linear(288, 160), nn.Linear(160, 160), nn.Linear(160, 10)
        self.some, self.never = (nn.Linear(160, 10), nn.Linear(8, 8)) if unused else (None, None)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        h = self.more(self.hidden(self.conv(x).flatten(1)).tanh()).tanh()
        out: Tensor = self.last(h)
        return out + self.some(h) if self.some is not None and self.rank % 2 else out


def build(rank: int, spec: str | None, *, unused: bool = False, cap: float = 0.1, **more: Any) -> tuple[Any, Any, Any]:
    """A DDP model with the hook, its hook's state, and a plain optimizer."""
    torch.manual_seed(3)
    model = DistributedDataParallel(
        Net(rank, unused=unused), bucket_cap_mb=cap, find_unused_parameters=unused, **more
    )  # fmt: skip
    state = None
    if spec is not None:
        state, hook = syncline.ddp_hook(spec)
        model.register_comm_hook(state, hook)
    return model, state, torch.optim.SGD(model.parameters(), lr=LR)


def backward(model: nn.Module, rank: int, step: int, micro: int = 0) -> float:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x, y = torch.randn(6, 3, 8, 8, generator=generator), torch.randn(6, 10, generator=generator)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return float(loss.detach())


def train(model: Any, optimizer: Any, rank: int, begin: int, end: int) -> list[float]:
    losses = []
    for step in range(begin, end):
        losses.append(backward(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(t, b[k]) for k, t in a.items())


# -- dense -------------------------------------------------------------------------------------------------------------


def accumulated(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        with model.no_sync():
            backward(model, rank, step, 0)
        backward(model, rank, step, 1)
        optimizer.step()
        optimizer.zero_grad()


def dense(rank: int, world: int) -> dict[str, bool]:
    plain: Callable[..., Any] = lambda m, o, r: train(m, o, r, 0, STEPS)  # noqa: E731
    cases: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "plain": (plain, {}),
        "one bucket": (plain, {"cap": 25}),
        "views": (plain, {"gradient_as_bucket_view": True}),
        "unused": (plain, {"unused": True}),
        "unused views": (plain, {"unused": True, "gradient_as_bucket_view": True}),
        "accumulated": (accumulated, {}),
        "accumulated views": (accumulated, {"gradient_as_bucket_view": True}),
    }
    same = {}
    for name, (loop, options) in cases.items():
        seen = []
        for spec in (None, "none"):
            model, state, optimizer = build(rank, spec, **options)
            loop(model, optimizer, rank)
            seen.append(values(model))
        assert state.step == STEPS, name
        assert len(state._units) == 1 if name == "one bucket" else len(state._units) > 2, name
        same[name] = equal(*seen)
    # Garbage leaves no thread behind.
    del model, state
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("syncline-")]
    return same


def test_dense_matches_ddp_bit_for_bit() -> None:
    for same in run_ranks(dense, 2, timeout=100):
        assert all(same.values()), same


# -- codecs ------------------------------------------------------------------------------------------------------------


def spy(kept: tuple[Any, list[Any]], bucket):
    """The hook, which notes the bucket's parameters and this rank's gradients on its way."""
    state, steps = kept
    local = {id(p): g.clone() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    for p in bucket.parameters():
        if p.dim() == 4:  # laid out as the parameter is, which is channels last
            local[id(p)] = local[id(p)].as_strided(p.shape, p.stride())
    future = state.average(bucket)
    slots = state._units[bucket.index()].slots
    steps[-1][0].append(([s.name for s in slots], [local[id(s.parameter)] for s in slots]))
    return future


def spied(rank: int, world: int) -> bytes:
    """Every spec: buckets as they came with this rank's gradients, averaged gradients, the state at the end."""
    done: dict[str, Any] = {}
    for spec in SPECS:
        model, _, optimizer = build(rank, None)
        state, _ = syncline.ddp_hook(spec)
        steps: list[Any] = []
        model.register_comm_hook((state, steps), spy)
        for step in range(STEPS):
            steps.append(([], {}))
            backward(model, rank, step)
            names = {id(slot.parameter): slot.name for slot in state._slots.values()}
            steps[-1][1].update({names[id(p)]: p.grad.clone() for p in model.parameters()})
            optimizer.step()
            optimizer.zero_grad()
        kept = state.state_dict(model)
        public = {name: names[id(p)] for name, p in model.module.named_parameters()}
        kept = {f"{public[k.rpartition('.')[0]]}.{k.rpartition('.')[2]}": t for k, t in kept.items() if "step" not in k}
        done[spec] = {"steps": steps, "state": kept, "carrier": state._exchange.pattern}
        state.close()
    file = io.BytesIO()
    torch.save(done, file)
    return file.getvalue()


def test_codecs_match_lockstep_when_ddp_changes_its_buckets() -> None:
    did = [torch.load(io.BytesIO(data), weights_only=True) for data in run_ranks(spied, 2, timeout=100)]
    for spec in SPECS:
        mine = [d[spec] for d in did]
        layouts = [[names for names, _ in buckets] for buckets, _ in mine[0]["steps"]]
        assert layouts[0] != layouts[1], "DDP was to form its buckets anew after the first step"
        assert all([[n for n, _ in b] for b, _ in m["steps"]] == layouts for m in mine)
        kept: list[dict[str, Tensor]] = [{}, {}]
        sums: dict[str, Tensor] = {}
        for step in range(STEPS):
            for place, names in enumerate(layouts[step]):
                grads = [m["steps"][step][0][place][1] for m in mine]
                states = [{k: t for k, t in s.items() if k.rpartition(".")[0] in names} for s in kept]
                done = exchange.lockstep(
                    spec, grads, exchange=mine[0]["carrier"], names=names, states=states, first_step=step, small=SMALL
                )
                for state, new in zip(kept, done.states, strict=True):
                    state.update(new)
                for at, name in enumerate(names):
                    averages = [m["steps"][step][1][name] for m in mine]
                    assert torch.equal(*averages), f"{spec}: the ranks differ in step {step}, {name}"
                    torch.testing.assert_close(averages[0], done.outputs[0][at], rtol=1e-5, atol=1e-6)
                    owed = (grads[0][at] + grads[1][at]) / 2 - averages[0]
                    sums[name] = sums.get(name, 0) + owed
        for m, state in zip(mine, kept, strict=True):
            assert m["state"].keys() == state.keys(), spec
            for key, tensor in state.items():
                torch.testing.assert_close(m["state"][key].view_as(tensor), tensor, rtol=1e-4, atol=1e-5)
        if spec != "int8" and not spec.startswith("dgc"):
            # Whatever gradients have not arrived is in the residuals: nothing was lost with the old buckets. (A sum of
            # bf16 numbers on the wire is rounded, and that is nobody's residual.)
            close = 1e-3 if "bf16" in spec else 1e-5
            for name, total in sums.items():
                errors = [m["state"][f"{name}.error"].view_as(total) for m in mine]
                torch.testing.assert_close((errors[0] + errors[1]) / 2, total, rtol=1e-4, atol=close)


def converges(rank: int, world: int) -> tuple[float, float, bool]:
    """Where torch's own powersgd hook aborts: Gloo and four ranks."""
    model, _, optimizer = build(rank, "powersgd(rank=4)")
    losses = [train(model, optimizer, rank, 0, 1)[0] for _ in range(20)]
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    others = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(others, flat)
    return losses[0], losses[-1], all(torch.equal(flat, other) for other in others)


def test_powersgd_on_four_gloo_ranks() -> None:
    for first, last, same in run_ranks(converges, 4, timeout=100):
        assert last < 0.7 * first
        assert same


# -- state -------------------------------------------------------------------------------------------------------------


def resumed(rank: int, world: int) -> dict[str, bool]:
    same = {}
    for spec in ("powersgd(rank=4)", "acpsgd(rank=2)", "topk(0.05)", "dgc(0.05)", "int8"):
        # A codec of matrices has the same results in any bucket; others share top-k and scales within one.
        cap = 0.1 if "sgd" in spec else 25
        model, state, optimizer = build(rank, spec, cap=cap)
        train(model, optimizer, rank, 0, 3)
        file = io.BytesIO()
        torch.save({"model": model.module.state_dict(), "codec": state.state_dict(model)}, file)
        train(model, optimizer, rank, 3, 6)
        end = values(model), state.state_dict(model)
        again, other, optimizer = build(rank, spec, cap=cap)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert all(name == "syncline.step" or name[:7] != "module." for name in saved["codec"])
        again.module.load_state_dict(saved["model"])
        other.load_state_dict(again, saved["codec"])
        assert equal(other.state_dict(again), saved["codec"]), spec
        train(again, optimizer, rank, 3, 6)
        same[spec] = equal(values(again), end[0]) and equal(other.state_dict(again), end[1])
        state.close()
        other.close()
    return same


def test_a_saved_state_resumes_bit_for_bit() -> None:
    for same in run_ranks(resumed, 2, timeout=100):
        assert all(same.values()), same


def edges(rank: int, world: int) -> None:
    """What goes wrong goes wrong in words, and costs no residual."""
    model, state, optimizer = build(rank, "topk(0.05)", cap=25)
    train(model, optimizer, rank, 0, 2)
    before = state.state_dict(model)
    hook = model.module.last.weight.register_hook(lambda g: g * float("nan") if rank else g)
    backward(model, rank, 2)
    hook.remove()
    after = state.state_dict(model)
    assert int(after.pop("syncline.step")) == int(before.pop("syncline.step")) + 1
    broken = "more.weight"  # large enough to travel by itself, and finite
    assert not torch.equal(after[f"{broken}.error"], before[f"{broken}.error"])
    small = ("last.weight.error", "last.bias.error", "conv.bias.error")  # these travel together
    assert all(torch.equal(after[name], before[name]) for name in small)

    # A backward pass that breaks off on all ranks leaves no trace, and the next one works.
    def stop(_grad: Tensor) -> None:
        raise InterruptedError

    optimizer.zero_grad()
    model, state, optimizer = build(rank, "topk(0.05)")
    train(model, optimizer, rank, 0, 2)
    before = state.state_dict(model)
    hook = model.module.conv.weight.register_hook(stop)
    with pytest.raises(InterruptedError):
        backward(model, rank, 2)
    hook.remove()
    assert state._sent, "some bucket was to be on its way"
    assert equal(state.state_dict(model), before)

    # The state of attach is the hook's, and the other way round.
    plain = copy.deepcopy(model.module)
    sync = syncline.attach(plain, torch.optim.SGD(plain.parameters(), lr=LR), compress="topk(0.05)")
    sync.load_state_dict(before)
    assert all(torch.equal(t, before[k]) for k, t in sync.state_dict().items())
    sync.close()

    with pytest.raises(UsageError, match="another model"):
        state.load_state_dict(model, {"nobody.error": torch.zeros(3)})
    with pytest.raises(UsageError, match="differ between the ranks"):
        syncline.ddp_hook("none", seed=rank)
    with pytest.raises(UsageError, match="do not train"):
        syncline.ddp_hook("none", exchange="server(dedicated=true)")
    with pytest.raises(UsageError, match="topk"):
        syncline.ddp_hook("topkk")


def test_broken_steps_and_refused_options() -> None:
    run_ranks(edges, 2, timeout=60)


def alone(rank: int, world: int) -> bool:
    seen = []
    for spec in (None, "powersgd(rank=1)"):
        model, _, optimizer = build(rank, spec)
        train(model, optimizer, rank, 0, 3)
        seen.append(values(model))
    return equal(*seen)


def test_one_rank_sends_nothing() -> None:
    assert run_ranks(alone, 1) == [True]


def dies(rank: int, world: int) -> None:
    model, _, optimizer = build(rank, "powersgd(rank=4)")
    train(model, optimizer, rank, 0, 3)
    if rank == 1:
        os._exit(9)
    train(model, optimizer, rank, 3, 6)


def test_a_dead_peer_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipes = [ranks.CONTEXT.Pipe(duplex=False) for _ in range(2)]
        processes = [
            ranks.CONTEXT.Process(target=ranks._rank, args=(dies, rank, 2, (), folder, pipes[rank][1], 15))
            for rank in range(2)
        ]
        try:
            for process in processes:
                process.start()
            assert pipes[0][0].poll(60), "rank 0 hangs"
            error, _ = pipes[0][0].recv()
            processes[1].join(10)
            assert processes[1].exitcode == 9
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert "backward" in error
    assert "rank 1" in error


def test_without_a_process_group_the_error_names_the_hook() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"^ddp_hook needs a process group: call torch.distributed.init_process_group"):
        syncline.ddp_hook("int8")
    with pytest.raises(UsageError, match=r"^ddp_hook cannot choose codecs: name one, such as 'powersgd\(rank=4\)'"):
        syncline.ddp_hook("auto(int8)")
    with pytest.raises(UsageError, match=r"^attach needs a process group"):
        syncline.attach(nn.Linear(2, 2))
