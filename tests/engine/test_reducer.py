"""torch's reducer as an executor: the same updates as the plain loop, also in loops that DDP does not allow."""

import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from ranks import run_ranks
from syncline.engine.executors.reducer import BucketReducer
from syncline.engine.optimizer.step import Stepper
from syncline.engine.tuning.executor_trial import TIMED
from syncline.engine.tuning.tuner import PROFILED, WARM_UP
from syncline.errors import UsageError
from syncline.plan import CodecCost, Costs, Curve, LinkCost, Plan, Shape, bucket_plan, default_plan, predict
from syncline.trace import Recorder

STEPS = 6


def model(layers: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])


def shapes_of(net: nn.Module) -> list[Shape]:
    return [Shape(name, tuple(p.shape), p.dtype) for name, p in net.named_parameters()]


def reducer_plan(net: nn.Module, codec: str = "none") -> Plan:
    """Several buckets."""
    return bucket_plan(shapes_of(net), codec=codec, bucket_bytes=200)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + rank))


def forward(net: nn.ModuleList, x: Tensor, skip: int | None = None) -> Tensor:
    """Modules are called one by one: no hook of the whole model runs."""
    for at, layer in enumerate(net):
        if at != skip:
            x = layer(x).tanh()
    return x.square().mean()


def averaged(net: nn.Module) -> None:
    """What the plain loop does after backward: parameters that no rank used keep no gradient."""
    for p in net.parameters():
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used)
        if used:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad)
            p.grad = grad.div_(dist.get_world_size())


Loop = Callable[[nn.ModuleList, Any, int, Callable[[], None]], list[Tensor]]


def trained(loop: Loop, rank: int, *, attached: bool, codec: str = "none") -> list[Tensor]:
    """Parameters after a loop, and what it has read."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if not attached:
        read = loop(net, optimizer, rank, lambda: averaged(net))
        return [*read, *(p.detach().clone() for p in net.parameters())]
    sync = syncline.attach(net, optimizer, plan=reducer_plan(net, codec))
    read = loop(net, optimizer, rank, lambda: None)
    sync.close()
    return [*read, *(p.detach().clone() for p in net.parameters())]


def ranks_use_different_layers(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    none = []
    for step in range(STEPS):
        # Step 1: rank 1 skips a layer; step 2: every rank skips another one; step 3: no rank uses layer 2.
        skip = {1: 1 if rank else None, 2: rank, 3: 2}.get(step)
        forward(net, batch(rank, step), skip).backward()
        average()
        none.append(torch.tensor([p.grad is None for p in net.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return none


def gradients_are_kept(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    """Rank 0 keeps the gradients of a step without a copy."""
    return kept_by_rank_0(net, optimizer, rank, average, lambda grad: grad)


def views_of_gradients_are_kept(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    return kept_by_rank_0(net, optimizer, rank, average, lambda grad: grad.view(-1))


def kept_by_rank_0(
    net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None], keep: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    kept: list[Tensor] = []
    for step in range(STEPS):
        forward(net, batch(rank, step)).backward()
        average()
        if rank == 0 and step == 1:
            kept += [keep(p.grad) for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return kept


def gradients_are_the_users_memory(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    first = 0
    for p in net.parameters():
        p.grad = flat[first : first + p.numel()].view(p.shape)
        first += p.numel()
    seen = []
    for step in range(STEPS):
        flat.zero_()
        forward(net, batch(rank, step)).backward()
        average()
        seen.append(flat.clone())
        optimizer.step()
    return seen


def gradients_stay_in_place(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    for step in range(STEPS):
        forward(net, batch(rank, step)).backward()
        average()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return []


def backward_by_another_name(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    run = BACKWARD
    for step in range(STEPS):
        run([forward(net, batch(rank, step)), forward(net, batch(rank, step + 50))])
        average()
        optimizer.step()
        optimizer.zero_grad()
    return []


BACKWARD = torch.autograd.backward


def frozen_and_unfrozen(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    for step in range(STEPS):
        net[1].requires_grad_(step not in (2, 3))
        forward(net, batch(rank, step)).backward()
        average()
        optimizer.step()
        optimizer.zero_grad()
    return []


def a_pass_of_another_model(net: nn.ModuleList, optimizer: Any, rank: int, average: Callable[[], None]) -> Any:
    other = nn.Linear(8, 1)
    for step in range(STEPS):
        forward(net, batch(rank, step)).backward()
        other(batch(rank, step)).sum().backward()
        torch.autograd.grad(forward(net, batch(rank, step)), list(net.parameters()))
        average()
        optimizer.step()
        optimizer.zero_grad()
    return []


LOOPS: list[Loop] = [
    ranks_use_different_layers,
    gradients_are_kept,
    views_of_gradients_are_kept,
    gradients_are_the_users_memory,
    gradients_stay_in_place,
    backward_by_another_name,
    frozen_and_unfrozen,
    a_pass_of_another_model,
]


def run_loops(rank: int, world: int) -> dict[str, list[bool]]:
    found = {}
    for loop in LOOPS:
        want, got = (trained(loop, rank, attached=attached) for attached in (False, True))
        assert len(want) == len(got)
        found[loop.__name__] = [torch.equal(a, b) for a, b in zip(want, got, strict=True)]
    return found


def test_loops_are_bit_equal_to_the_plain_loop() -> None:
    for found in run_ranks(run_loops, 2):
        for name, equal in found.items():
            assert all(equal), f"{name}: {equal}"


def codecs_and_accumulation(rank: int, world: int) -> None:
    """The same loop under both executors: two micro-batches under no_sync and one beside it, from one plan."""
    results = []
    for codec in ("none", "bf16", "fp16"):
        for executor in ("overlap", "reducer"):
            net = model()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            sync = syncline.attach(net, optimizer, plan=replace(reducer_plan(net, codec), executor=executor))
            for step in range(STEPS):
                if step % 2:
                    with sync.no_sync():
                        forward(net, batch(rank, step + 10)).backward()
                        forward(net, batch(rank, step + 20), skip=2).backward()
                forward(net, batch(rank, step), skip=3 if step == 3 else None).backward()
                optimizer.step()
                optimizer.zero_grad()
            sync.close()
            results.append([p.detach().clone() for p in net.parameters()])
    for overlap, reducer in zip(results[::2], results[1::2], strict=True):
        # With three ranks a share of 1/3 is rounded, and a sum has several orders.
        rtol, atol = (0.0, 0.0) if world == 2 else (2e-2, 2e-4)
        for a, b in zip(overlap, reducer, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("world", [2, 3])
def test_both_executors_give_the_same_update_with_every_codec(world: int) -> None:
    run_ranks(codecs_and_accumulation, world)


def switches(rank: int, world: int) -> tuple[list[Any], float, list[str]]:
    """Executors change between steps, from a codec with residuals too: nothing that is owed is lost."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    overlap = default_plan(shapes_of(net), group_bytes=0)
    lossy = default_plan(shapes_of(net), compress="topk(ratio=0.1)", group_bytes=0)
    sync = syncline.attach(net, optimizer, plan=overlap)
    follow = {0: overlap, 1: reducer_plan(net), 2: overlap, 3: lossy, 4: reducer_plan(net)}
    executors: list[str] = []
    sent: list[Tensor] = []
    mine: list[Tensor] = []
    for step in range(8):
        if step in follow:
            sync.replan(follow[step])
        forward(net, batch(rank, step)).backward()
        executors.append(type(sync._backward).__name__ if not sync._reducer.active else "reducer")
        if step >= 3:
            sent += [p.grad.detach().clone() for p in net.parameters() if p.grad is not None]
            mine += local(net, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    state = sync.state_dict()
    sync.close()
    assert list(state) == ["syncline.step"]
    owed = sum(t.double().sum() for t in mine)
    dist.all_reduce(owed)
    lost = float(owed / world - sum(t.double().sum() for t in sent))
    return [p.tolist() for p in net.parameters()], lost, executors


def leaves_zeros(rank: int, world: int) -> tuple[list[bool], list[str]]:
    """As on a GPU, where a codec without feedback cannot know whether it has added a residual."""
    launch_run = import_module("syncline.engine.launch.run")
    original = launch_run.new_state

    def new_state(result: Any, old: Any) -> dict[str, Tensor]:
        new: dict[str, Tensor] = original(result, old)
        return new or {key: torch.zeros_like(tensor) for key, tensor in old.items() if key == "error"}

    launch_run.new_state = new_state
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = syncline.attach(net, optimizer, plan=default_plan(shapes_of(net), compress="topk(ratio=0.1)", group_bytes=0))
    active = []
    for step in range(4):
        if step == 1:
            sync.replan(reducer_plan(net))
        forward(net, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        active.append(sync._reducer.active)
    state = list(sync.state_dict())
    sync.close()
    return active, state


def test_residuals_that_were_sent_do_not_keep_the_reducer_away() -> None:
    for active, state in run_ranks(leaves_zeros, 2):
        assert active == [False, True, True, True]
        assert state == ["syncline.step"]


def local(net: nn.ModuleList, rank: int, step: int) -> list[Tensor]:
    """This rank's gradients of a step, without an exchange."""
    return list(torch.autograd.grad(forward(net, batch(rank, step)), list(net.parameters())))


def test_executors_change_between_steps() -> None:
    (first, lost, executors), (second, _, _) = run_ranks(switches, 2)
    assert first == second
    # The first dense pass after a codec with residuals adds them, in our own executor.
    assert executors == ["Backward", "reducer", *["Backward"] * 3, *["reducer"] * 3]
    assert abs(lost) < 1e-5


def unusual(rank: int, world: int) -> list[str]:
    """Loops that need the other executor or raise; all ranks alike."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("syncline").addHandler(handler)

    def directly(loss: Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def compiled(loss: Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            loss.backward()

    def in_threads(loss: Tensor) -> None:
        nn.Linear(8, 1)(batch(rank, 0)).sum().backward()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    for run in (lambda loss: loss.backward(create_graph=True), directly, in_threads, compiled):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sync = syncline.attach(net, optimizer, plan=reducer_plan(net))
        if run not in (compiled, in_threads):
            run(nn.Linear(8, 1)(batch(rank, 0)).sum())
            assert sync.plan.executor == "reducer", "a pass of another model does not matter"
        run(forward(net, batch(rank, 0)))
        optimizer.step()
        assert sync.plan.executor == "overlap"
        sync.close()
        values = [torch.empty(8, 8) for _ in range(world)]
        dist.all_gather(values, net[0].weight.detach())
        assert torch.equal(*values)

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = syncline.attach(net, optimizer, plan=reducer_plan(net))
    hook = net[3].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(UsageError, match=r"gradients are averaged when backward\(\) returns"):
        forward(net, batch(rank, 0)).backward()
    hook.remove()
    # The pass that failed is finished by the next one, on all ranks.
    optimizer.zero_grad()
    forward(net, batch(rank, 1)).backward()
    got = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    sync.close()
    want = model()
    forward(want, batch(rank, 1)).backward()
    averaged(want)
    texts += [str(torch.equal(g, p.grad)) for g, p in zip(got, want.parameters(), strict=True) if p.grad is not None]
    return texts


def test_a_loop_that_the_reducer_cannot_run_keeps_the_other_executor() -> None:
    first, second = run_ranks(unusual, 2)
    whys = [
        text.partition(": gradients are averaged by Syncline's executor instead of torch's reducer") for text in first
    ]
    assert [why for why, says, _ in whys if says] == [
        "syncline: backward(create_graph=True) keeps the graph of gradients",
        "syncline: a backward pass was run by other code than torch.autograd.backward",
        "syncline: several threads run backward passes",
        "syncline: the backward pass is compiled (compiled autograd)",
    ]
    assert first[-8:] == second == ["True"] * 8


def unusual_on_rank_1(rank: int, world: int) -> str:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = syncline.attach(net, optimizer, plan=reducer_plan(net), timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice about create_graph
        with pytest.raises(UsageError) as error:
            forward(net, batch(rank, 0)).backward(create_graph=rank == 1)
    sync.close(reuse_groups=False)
    return str(error.value)


def test_one_rank_alone_that_needs_the_other_executor_is_named_on_all() -> None:
    """Gloo ends the process if messages of two executors meet."""
    began = time.monotonic()
    for text in run_ranks(unusual_on_rank_1, 2):
        assert "create_graph=True) keeps the graph of gradients on rank 1, and not on rank 0: run" in text
    assert time.monotonic() - began < 15


def recorded(rank: int, world: int, codec: str) -> tuple[set[tuple[str, str, str]], list[bool]]:
    """Spans while recording, none before; the results do not depend on it."""
    outcomes = []
    spans: set[tuple[str, str, str]] = set()
    for record in (False, True):
        net = nn.Sequential(model(2), nn.BatchNorm1d(8))
        recorder = Recorder(rank=rank, enabled=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sync = syncline.attach(net, optimizer, plan=reducer_plan(net, codec), recorder=recorder)
        for step in range(4):
            recorder.enabled = record and step == 2
            recorder.step = step
            forward(net[0], net[1](batch(rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.close()
        spans |= {(s.lane, s.name, s.unit) for s in recorder.spans() if s.step == 2}
        assert {s.step for s in recorder.spans()} <= {2}
        outcomes.append([p.detach().clone() for p in net.parameters()])
    return spans, [torch.equal(a, b) for a, b in zip(*outcomes, strict=True)]


def test_every_bucket_has_a_span_while_recording() -> None:
    for codec in ("none", "bf16"):
        for spans, equal in run_ranks(recorded, 2, codec):
            assert all(equal)
            buckets = {unit for lane, name, unit in spans if (lane, name) == ("exchange", "allreduce")}
            assert buckets == {"bucket 0", "bucket 1"}
            assert ("exchange", "broadcast", "buffers") in spans
            assert ("update", "update", "all") in spans


def test_a_plan_that_the_reducer_cannot_run_is_refused() -> None:
    shapes = [Shape("a.weight", (100, 100)), Shape("b.weight", (100, 100))]
    good = bucket_plan(shapes)
    good.check(shapes)
    with pytest.raises(UsageError, match=r"executor 'reducer' takes codec none, bf16, fp16"):
        replace(default_plan(shapes, compress="powersgd(rank=2)"), executor="reducer").check(shapes)
    with pytest.raises(UsageError, match=r"unknown executor 'reduce': did you mean 'reducer'\?"):
        replace(good, executor="reduce").check(shapes)
    first, second = bucket_plan(shapes, bucket_bytes=1).units
    with pytest.raises(UsageError, match=r"codecs bf16, none: executor 'reducer' takes the same codec"):
        replace(bucket_plan(shapes, bucket_bytes=1), units=(first, replace(second, codec="bf16"))).check(shapes)


def test_buckets_follow_the_backward_pass() -> None:
    shapes = [Shape(f"{i}.weight", (1 << 18,)) for i in range(6)] + [Shape("half", (4,), torch.float16)]
    plan = bucket_plan(shapes, bucket_bytes=2 << 20)
    plan.check(shapes)
    sent = {unit.name: unit.parameters for unit in plan.units}
    assert [sent[name] for name, _ in plan.order] == [
        ("half",), ("4.weight", "5.weight"), ("2.weight", "3.weight"), ("0.weight", "1.weight")
    ]  # fmt: skip
    at = {shape.name: float(i) for i, shape in enumerate(shapes)}
    other = bucket_plan(shapes, bucket_bytes=1 << 20, complete=at)
    first = other.order[0][0]
    assert {unit.name: unit.parameters for unit in other.units}[first] == ("0.weight",)
    assert len(bucket_plan(shapes[:-1]).units) == 2, "a small first one, as under DDP"
    assert len(bucket_plan(shapes[:-1], bucket_bytes=100 << 20).units) == 1


def wrapped(rank: int, world: int) -> bool:
    """Under DDP with gradient_as_bucket_view, and attached with the reducer: the same bits, buffers included."""
    ends = []
    for attached in (False, True):
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(net.parameters())
        call: Any = net
        if attached:
            sync = syncline.attach(net, optimizer, plan=reducer_plan(net))
        else:
            call = DistributedDataParallel(net, gradient_as_bucket_view=True)
        for step in range(STEPS):
            call(batch(rank, step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if attached:
            sync.close()
        del call
        ends.append([*net.parameters(), *(net.buffers() if rank == 0 else ())])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_attach_with_the_reducer_is_ddp() -> None:
    assert run_ranks(wrapped, 2) == [True, True]


def tried(rank: int, world: int) -> list[tuple[str, list[int], bool]]:
    """Tuning, with one of the two executors slowed down; then a loop that the reducer cannot run."""
    found = []
    for slow in ("overlap", "reducer"):
        owner: Any = Stepper if slow == "overlap" else BucketReducer
        name = "_hand_over" if slow == "overlap" else "finish"
        original = getattr(owner, name)

        def late(self: Any, *given: Any, of: Any = original, **named: Any) -> Any:
            time.sleep(0.02)
            return of(self, *given, **named)

        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sync = syncline.attach(net, optimizer)
        setattr(owner, name, late)
        try:
            steps = WARM_UP + PROFILED + 3 * (TIMED + 1) + 1
            for step in range(steps):
                forward(net, batch(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            setattr(owner, name, original)
        assert sync.auto is not None
        kept, planned_at = sync.plan.executor, list(sync.auto.planned_at)
        if kept == "reducer":
            forward(net, batch(rank, 0)).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        found.append((kept, planned_at, sync.plan.hash == sync.auto.choice.plan.hash))
        assert sync.plan.executor == "overlap"
        sync.close()
    return found


@pytest.mark.full
@pytest.mark.timeout(90)
def test_tuning_keeps_the_executor_that_is_faster() -> None:
    first, second = run_ranks(tried, 2, timeout=80)
    assert first == second
    at = [WARM_UP + PROFILED]
    assert first == [("reducer", at, True), ("overlap", at, True)]


def test_the_predicted_step_of_the_reducer() -> None:
    shapes = [Shape("first", (1000,)), Shape("last", (3000,))]
    line = Curve(0.0, 0.0)
    costs = Costs(
        world=2,
        forward=1.0,
        backward=2.0,
        touched={"first": 0.0, "last": 0.5},
        complete={"last": 0.5, "first": 2.0},
        link=LinkCost(latency=0.25, bytes_per_s=4000.0),
        codecs={"none": CodecCost(line, line, line)},
        update=Curve(0.0, 1e-4),
        data=0.125,
    )
    # A rank sends 12 kB from 0.5 s to 3.75 s and then 4 kB, to 5 s; the update of 4000 values takes 0.4 s.
    plan = bucket_plan(shapes, bucket_bytes=1)
    assert predict(plan, shapes, costs).step == pytest.approx(0.125 + 1.0 + 5.0 + 0.4)
    # In one bucket all is sent at the end of the backward pass.
    assert predict(bucket_plan(shapes), shapes, costs).step == pytest.approx(0.125 + 1.0 + 2.0 + 4.25 + 0.4)


def dropped(rank: int, world: int) -> tuple[bool, bool]:
    """The engine trains while the model lives, also if nobody holds it; then it is collected."""
    net = model()
    known = weakref.ref(syncline.attach(net, plan=reducer_plan(net)))
    gc.collect()
    forward(net, batch(rank, 0)).backward()
    values = [torch.empty(8, 8) for _ in range(world)]
    assert net[0].weight.grad is not None
    dist.all_gather(values, net[0].weight.grad.contiguous())
    del net
    gc.collect()
    return torch.equal(*values), known() is None


def test_an_engine_that_nobody_holds() -> None:
    assert run_ranks(dropped, 2) == [(True, True)] * 2
