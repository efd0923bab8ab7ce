"""Faults: ranks that die, stop, raise or hang; broken gradients; plans that differ; the end of a script.

Every lost or stuck rank becomes a `PeerError` with its name on every other rank, within the timeout and the seconds
that it takes to look around. Each test asserts that its fault fired.
"""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_helpers import process_letter
from torch import Tensor, nn

import syncline
from ranks import CONTEXT, run_ranks
from syncline.codecs import Mean, Out, Steps
from syncline.codecs.definition import Definition
from syncline.codecs.state import State
from syncline.errors import UsageError
from syncline.plan import Shape, default_plan

TIMEOUT = 5.0
GRACE = 6.0
"""Seconds beyond the timeout: to look at the others, and for a machine with much else to do."""
WORLD, ODD, SURVIVED = 3, 1, 7
REDUCER = "reducer"
"""In place of a codec: dense gradients, averaged by torch's reducer."""


def build(spec: str | None = None, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    shapes = [Shape(name, tuple(p.shape)) for name, p in net.named_parameters()]
    codec, _, carrier = (spec or "none").partition(" over ")
    codec = "none" if codec == REDUCER else codec
    plan = default_plan(shapes, compress=codec, exchange=carrier or None, group_bytes=0, world=WORLD)
    plan = replace(plan, executor="reducer") if spec == REDUCER else plan
    return net, optimizer, syncline.attach(net, optimizer, plan=plan, **options)


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)
    return F.mse_loss(net(x), y)


def parameters(net: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in net.parameters()]


def ours() -> list[str]:
    """The engine's threads in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline")]


# -- ranks that are lost


def _survivor(
    rank: int, folder: str, pipe: Connection, spec: str | None, fault: str, at: int, caught: bool
) -> None:  # fmt: skip
    """Train until something happens; say what, and what is left after close. Or let the error end the interpreter."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=40))
    net, optimizer, sync = build(spec, timeout=TIMEOUT)

    def fire() -> None:
        pipe.send(("fired", time.monotonic(), sync.step))
        FAULTS[fault]()

    try:
        for step in range(100_000):
            if rank >= sync.trainers:
                sync.serve(1)
                continue
            loss = loss_of(net, rank, step)
            if rank == ODD and step == at and fault in FAULTS:
                # The last layer's gradients are on their way by then, the first ones' are not there yet.
                net[2].weight.register_hook(lambda _: fire())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except BaseException as error:
        came = time.monotonic()
        if not caught:
            pipe.send(("ended", type(error).__name__, str(error), getattr(error, "ranks", None), came, 0, []))
            sys.last_value = error
            # As a script ends, which processes of multiprocessing do not: callbacks, threads, destructors.
            ctypes.pythonapi.Py_Exit(SURVIVED)
        try:
            sync.close()
        except BaseException as more:
            pipe.send(("close failed", repr(more)))
        closed = time.monotonic() - came
        pipe.send(("ended", type(error).__name__, str(error), getattr(error, "ranks", None), came, closed, ours()))
        pipe.close()
        sys.exit(SURVIVED)


def _raise() -> None:
    raise ValueError("the user's own code is broken")


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "sleep": lambda: time.sleep(60),
}


def _raises(grad: Tensor, state: State, *, at: int = 0) -> Steps:
    """A codec that breaks on one rank."""
    if state.rank == ODD and state.step == at:
        raise ValueError("the user's codec is broken")
    mean = yield Mean(grad)
    return Out(mean, grad)


# Not filed under a name: the list of codecs stays as it is.
raises = Definition("raises", _raises, False, "flat", "nothing", None, (), False, False, False)


def lose(spec: str | None, fault: str, at: int, *, caught: bool = True) -> tuple[list[Any], list[Any]]:
    """(process, messages) of every rank, when all but the odd one have ended."""
    with tempfile.TemporaryDirectory() as folder:
        made = []
        try:
            for rank in range(WORLD):
                pipe, theirs = CONTEXT.Pipe(duplex=False)
                process = CONTEXT.Process(target=_survivor, args=(rank, folder, theirs, spec, fault, at, caught))
                process.start()
                theirs.close()
                made.append((process, pipe))
            told: list[list[Any]] = []
            for rank, (process, pipe) in enumerate(made):
                told.append([])
                until = time.monotonic() + 60
                waits = rank != ODD or fault not in ("kill", "stop", "sleep")
                while waits and (not told[-1] or told[-1][-1][0] != "ended") and time.monotonic() < until:
                    if pipe.poll(0.5):
                        told[-1].append(pipe.recv())
                if waits:
                    process.join(10)
            odd, pipe = made[ODD]
            while pipe.poll(0) and not told[ODD]:
                told[ODD].append(pipe.recv())
            states = [process_letter(odd.pid) if fault == "stop" else "", [p.exitcode for p, _ in made]]
            return told, states
        finally:
            for process, pipe in made:
                process.kill()
                process.join()
                process.close()
                pipe.close()


def check_survivors(told: list[Any], codes: list[int], text: str, *, within: float) -> None:
    fired = [message[1] for message in told[ODD] if message[0] == "fired"] or [told[ODD][0][4]]
    for rank in set(range(WORLD)) - {ODD}:
        assert [message[0] for message in told[rank]] == ["ended"], f"rank {rank}: {told[rank]}"
        _, kind, said, ranks, came, closed, left = told[rank][0]
        assert (kind, ranks) == ("PeerError", (ODD,)), f"rank {rank}: {kind}: {said}"
        assert f"rank {ODD} " in said
        assert text in said
        assert came - fired[0] < within, f"rank {rank} took {came - fired[0]:.1f} s"
        assert closed < 4, f"rank {rank} took {closed:.1f} s to close"
        assert left == [], f"rank {rank} has {left}"
        assert codes[rank] == SURVIVED


@pytest.mark.parametrize(
    ("spec", "caught"),
    [
        *((None, True), (REDUCER, False)),
        *(pytest.param("powersgd(rank=2)", caught, marks=pytest.mark.full) for caught in (False, True)),
        ("int8 over hierarchical(node=2)", True),  # rank 2, on another node, never talks to the killed one
        ("int8 over server(servers=2)", True),  # the killed rank is one of the servers
        ("int8 over server(dedicated=true)", True),  # rank 2 serves and has no loop of its own
    ],
)
def test_a_killed_rank_is_named_by_all_others(spec: str | None, caught: bool) -> None:
    at = random.randrange(1, 30)
    told, (_, codes) = lose(spec, "kill", at, caught=caught)
    assert codes[ODD] == -signal.SIGKILL, "the fault fired"
    assert told[ODD][0][2] == at
    check_survivors(told, codes, "is dead: last heartbeat", within=TIMEOUT + GRACE)


@pytest.mark.parametrize("spec", [pytest.param("powersgd(rank=2)", marks=pytest.mark.full), REDUCER])
def test_a_stopped_rank_is_named_by_all_others(spec: str) -> None:
    told, (letter, codes) = lose(spec, "stop", 3)
    assert letter == "T", "the fault fired"
    check_survivors(told, codes, "is stopped (SIGSTOP or a debugger)", within=TIMEOUT + GRACE)


def test_a_stuck_rank_is_named_by_all_others() -> None:
    told, (_, codes) = lose(None, "sleep", 3)
    assert told[ODD][0][0] == "fired"
    check_survivors(told, codes, "is alive but has not joined", within=TIMEOUT + GRACE)


@pytest.mark.parametrize(
    ("spec", "caught"),
    [(None, True), (REDUCER, True), *(pytest.param(spec, False, marks=pytest.mark.full) for spec in (None, REDUCER))],
)
def test_an_error_in_a_rank_reaches_all_others(spec: str | None, caught: bool) -> None:
    told, (_, codes) = lose(spec, "raise", 3, caught=caught)
    assert [message[0] for message in told[ODD]] == ["fired", "ended"]
    assert told[ODD][1][1:3] == ("ValueError", "the user's own code is broken")
    assert codes[ODD] == SURVIVED
    check_survivors(told, codes, "ended with ValueError: the user's own code is broken", within=TIMEOUT)


def test_an_error_in_a_codec_is_unchanged_and_reaches_all_others() -> None:
    told, (_, codes) = lose(f"{__name__}:raises(at=3)", "codec", 3)
    assert told[ODD][0][:3] == ("ended", "ValueError", "the user's codec is broken")
    check_survivors(told, codes, "ended with ValueError: the user's codec is broken", within=TIMEOUT)


# -- broken gradients


def broken(rank: int, world: int, spec: str, way: str) -> dict[str, Any]:
    """Train; in one step, rank 1 has a NaN gradient. `way` is what the user does about it."""
    net, optimizer, sync = build(spec)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaler", init_scale=4.0)
    fired, untouched, kept, skipped = False, False, 0, False
    for step in range(8):
        if way == "absent" and step == 3:
            continue
        before = sync.state_dict()
        at_first = parameters(net)
        loss = loss_of(net, rank, step)
        if step == 3 and rank == ODD:
            loss = loss * torch.nan
        scaler.scale(loss).backward()
        grads = torch.cat([p.grad.flatten() for p in net.parameters()]) if way != "step" else torch.zeros(1)
        if way == "skip" and not grads.isfinite().all():
            optimizer.zero_grad()
            skipped = True
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if step == 3:
            after = sync.state_dict()
            fired = not loss.isfinite() if rank == ODD else True
            kept = sum(key.endswith("error") for key in before)
            untouched = before.keys() == after.keys() and all(
                torch.equal(before[key], after[key]) for key in before if key != "syncline.step"
            )
            skipped = skipped or at_first == parameters(net)
            if way == "step":
                break  # the parameters are NaN: that is what the user asked for
    done = {
        "fired": fired, "untouched": untouched, "kept": kept, "skipped": skipped, "parameters": parameters(net),
        "state": {k: v.tolist() for k, v in sync.state_dict().items()},
    }  # fmt: skip
    sync.close()
    return done


def every_broken(rank: int, world: int, specs: list[str], ways: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(spec, way): broken(rank, world, spec, way) for spec in specs for way in ways}


def test_a_nan_gradient_leaves_residuals_untouched() -> None:
    specs, ways = ["powersgd(rank=2)", "topk(0.1)", "dgc(0.1)"], ["skip", "scaler", "step", "absent"]
    done = run_ranks(every_broken, 2, specs, ways)
    for case, first in done[0].items():
        if case[1] == "absent":
            continue
        for rank, d in enumerate(results[case] for results in done):
            assert d["fired"], case
            assert d["kept"] > 0, case
            assert d["untouched"], f"{case} on rank {rank}"
            assert d["skipped"] or case[1] == "step", case
            if case[1] == "step":
                assert not torch.tensor(d["parameters"][0]).isfinite().all(), "the step was made"
            else:
                assert all(torch.tensor(p).isfinite().all() for p in d["parameters"]), case
                assert d["parameters"] == first["parameters"], case
    # And training goes on as if that step had never been.
    for results in done:
        for spec in specs:
            assert results[spec, "skip"]["parameters"] == results[spec, "absent"]["parameters"]
            assert results[spec, "skip"]["state"] == results[spec, "absent"]["state"]


# -- ranks that do not fit together


def misfits(rank: int, world: int) -> dict[str, Any]:
    said: dict[str, str] = {}

    def attach(what: str, net: nn.Module, **options: Any) -> None:
        try:
            syncline.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), timeout=20.0, **options)
        except UsageError as error:
            said[what] = str(error)

    attach("plans", nn.Linear(4, 4), compress=None if rank != 1 else "powersgd(rank=2)")
    attach("models", nn.Linear(4, 4 + rank // 2))
    attach("seeds", nn.Linear(4, 4), seed=rank)
    attach("sentinels", nn.Linear(4, 4), sentinel=rank)
    # And then all is well.
    net, optimizer, sync = build()
    loss_of(net, rank, 0).backward()
    optimizer.step()
    sync.close()
    return {"said": said, "threads": ours(), "parameters": parameters(net)}


def test_plans_and_models_that_differ_are_an_error_on_every_rank() -> None:
    done = run_ranks(misfits, 3)
    for d in done:
        assert d["said"] == {
            "plans": "plans differ between the ranks: rank 1 has 'unit weight..bias: powersgd(rank=2) over allreduce,"
            " partitions 1', and rank 0 has 'unit weight..bias: none over allreduce, partitions 1'",
            "models": "the models' parameters differ between the ranks: rank 2 has 'weight: (5, 4) torch.float32', and"
            " rank 0 has 'weight: (4, 4) torch.float32'",
            "seeds": "attach's options differ between the ranks: rank 1 has 'seed: 1', and rank 0 has 'seed: 0'",
            "sentinels": "attach's options differ between the ranks: rank 1 has 'sentinel: 1', and rank 0 has"
            " 'sentinel: 0'",
        }
        assert d["threads"] == []
        assert d["parameters"] == done[0]["parameters"]


# -- ends


def twice(rank: int, world: int, between: bool) -> dict[str, Any]:
    """Six steps; `between`: closed and attached again after the third."""
    net, optimizer, sync = build("topk(0.5)", seed=3)
    done: dict[str, Any] = {}
    for step in range(6):
        if step == 3 and between:
            state = sync.state_dict()
            sync.close()
            sync.close()
            done = {
                "threads": ours(),
                "patched": [n for n in ("step", "zero_grad", "state_dict") if n in vars(optimizer)],
                "hooks": [bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in net.parameters()],
                "types": {type(p).__name__ for p in net.parameters()} | {type(optimizer.state).__name__},
                "module hooks": len(net._forward_pre_hooks),
            }
            sync = syncline.attach(net, optimizer, plan=sync.plan, seed=3)
            sync.load_state_dict(state)
        loss_of(net, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    done["parameters"] = parameters(net)
    done["momentum"] = [optimizer.state[p]["momentum_buffer"].flatten().tolist() for p in net.parameters()]
    sync.close()
    return done


def once_and_twice(rank: int, world: int) -> list[dict[str, Any]]:
    return [twice(rank, world, False), twice(rank, world, True)]


def test_close_restores_everything_and_attach_works_again() -> None:
    for once, again in run_ranks(once_and_twice, 2):
        assert again["threads"] == []
        assert again["patched"] == []
        assert not any(again["hooks"])
        assert again["types"] == {"Parameter", "defaultdict"}
        assert again["module hooks"] == 0
        assert again["parameters"] == once["parameters"]
        assert again["momentum"] == once["momentum"]


LOOP = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
attach()
for step in range(6):
    torch.manual_seed(100 * step)
    x, y = torch.randn(8, 12), torch.randn(8, 4)
    F.mse_loss(net(x[mine]), y[mine]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCRIPT = f"""
import atexit
@atexit.register
def tell():  # registered before anything of ours is imported, so that it runs last
    print([float(p.detach().double().sum()) for p in net.parameters()])
import syncline, torch.distributed as dist
dist.init_process_group("gloo")
mine = slice(dist.get_rank(), None, 2)
def attach():
    syncline.attach(net, optimizer)
{LOOP}
"""


def test_a_script_without_close_ends_cleanly_with_its_last_update() -> None:
    plain: dict[str, Any] = {"mine": slice(None), "attach": lambda: None}
    exec(LOOP, plain)
    expected = [float(p.detach().double().sum()) for p in plain["net"].parameters()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    made = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**env, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in made:
            out, errors = process.communicate(timeout=90)
            assert (process.returncode, errors) == (0, "")
            torch.testing.assert_close(json.loads(out), expected, rtol=1e-4, atol=1e-4)
    finally:
        for process in made:
            process.kill()
            process.wait()
