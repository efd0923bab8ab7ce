"""The engine over NCCL with several ranks on one device: loops match DDP, codecs match lockstep.

The record of the loops: SYNCLINE_LOOPS_RECORD=record.json pytest -s tests/engine/test_engine_gpu.py -k loops_are
With captured launches: SYNCLINE_CAPTURED_RECORD=record.json pytest -s tests/engine/test_engine_gpu.py -k loops_with
"""

import json
import os
import tempfile
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loops import run_rows, ways
from loops.table import ROWS
from torch import nn

import syncline
from syncline import plan
from syncline.cluster.gpu import mps_daemon
from syncline.engine.executors import streams
from syncline.engine.launch import capture
from syncline.errors import PeerError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
]
LOOP_SECONDS = float(os.environ.get("SYNCLINE_LOOPS_SECONDS", "420"))
"""Loops that have not begun by then are left out of the run on a GPU."""
PAIRS = max(1, (os.cpu_count() or 1) // 4)
"""Pairs of ranks that share the table of loops and the GPU."""


def join(rank: int, world: int, folder: str, timeout: float = 60) -> None:
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(
        "nccl", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout), device_id=torch.device("cuda", 0),
    )  # fmt: skip


def train_loops(rank: int, world: int, folder: str, wanted: list[str], captured: bool, seconds: float) -> None:
    join(rank, world, folder)
    ways.DEVICE[0], ways.CAPTURE[0] = "cuda", captured
    capture.WARM_UP = streams.EARLY_PASSES = 1  # loops of the table are short
    problems = run_rows.run_rows(rank, world, wanted, seconds=seconds)
    if rank == 0:
        rows = [
            {"cell": cell, "problem": text, "bits": run_rows.BITS.get(cell), "seconds": run_rows.SECONDS[cell]}
            for cell, text in problems.items()
        ]
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def run_loops(wanted: list[str], *, captured: bool, seconds: float, record_file: str | None) -> None:
    """Run these cells, as many as fit into the time; with `captured` launches from the second pass on."""
    with tempfile.TemporaryDirectory() as folder, mps_daemon() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        pairs = []
        for number in range(PAIRS):
            own = Path(folder, str(number))
            own.mkdir()
            arguments = (2, str(own), wanted[number::PAIRS], captured, seconds)
            pairs.append((own, mp.spawn(train_loops, args=arguments, nprocs=2, join=False)))
        for _, pair in pairs:
            while not pair.join():
                pass
        done = [row for own, _ in pairs for row in json.loads((own / "rows.json").read_text())]
    failed = [row for row in done if row["problem"]]
    record = {
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "ranks": 2, "in_table": len(wanted),
        "run": len(done), "bit_equal": sum(bool(row["bits"]) for row in done), "failed": len(failed),
        "seconds": round(sum(row["seconds"] for row in done), 1), "cells": done,
    }  # fmt: skip
    print(f"{'way':10} {'run':>5} {'bit-equal':>10} {'to rounding':>12} {'failed':>7}")
    for way in (*ways.WAYS, ways.START):
        mine = [row for row in done if row["cell"].endswith(f"-{way}")]
        bits, bad = sum(bool(row["bits"]) for row in mine), sum(bool(row["problem"]) for row in mine)
        print(f"{way:10} {len(mine):5} {bits:10} {len(mine) - bits - bad:12} {bad:7}")
    if record_file:
        Path(record_file).write_text(json.dumps(record, indent=1) + "\n")
    assert not failed, "\n".join(f"{row['cell']}: {row['problem']}" for row in failed)


def test_loops_are_ddp_over_nccl() -> None:
    """The table of loops on the GPU, as much as fits; SYNCLINE_LOOPS_RECORD names a file for the record."""
    rows = [row for row in ROWS.values() if row.cuda]
    # The core in all ways, then every loop over the late exchange and with torch's reducer, then the rest.
    core = [f"{row.name}-{way}" for row in rows if row.core for way in row.ways]
    late = [f"{row.name}-fine" for row in rows if "fine" in row.ways]
    reducer = [f"{row.name}-reducer" for row in rows if "reducer" in row.ways]
    rest = [f"{row.name}-{way}" for row in rows for way in row.ways]
    wanted = list(dict.fromkeys([*core, *late, *reducer, *rest]))
    file = os.environ.get("SYNCLINE_LOOPS_RECORD")
    run_loops(wanted, captured=False, seconds=LOOP_SECONDS, record_file=file)


def test_loops_with_captured_launches_over_nccl() -> None:
    """Loops under PowerSGD whose launches are captured from the second pass on, as many as fit."""
    wanted = [f"{row.name}-powersgd" for row in ROWS.values() if row.cuda and "powersgd" in row.ways]
    wanted.sort(key=lambda cell: not ROWS[cell.removesuffix("-powersgd")].core)
    file = os.environ.get("SYNCLINE_CAPTURED_RECORD")
    run_loops(wanted, captured=True, seconds=LOOP_SECONDS, record_file=file)


def codecs_over_nccl(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    for spec in ("none", "bf16", "powersgd(rank=2)", "acpsgd(rank=2) | bf16", "topk(0.1)", "int8", "dgc(0.05)"):
        torch.manual_seed(0)
        here = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10))
        there = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)).cuda()
        there.load_state_dict(here.state_dict())
        optimizer = torch.optim.SGD(there.parameters(), lr=0.05)
        sync = syncline.attach(there, optimizer, compress=spec)
        unit_names = [row.parameters for row in sync.plan.units]
        states: list[dict[str, Any]] = [{} for _ in range(world)]
        for step in range(6):
            generators = [torch.Generator().manual_seed(100 * step + r) for r in range(world)]
            batches = [torch.randn(16, 64, generator=g) for g in generators]
            there(batches[rank].cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            grads = [_grads(here, batch) for batch in batches]
            for names in unit_names:
                done = syncline.codecs.lockstep(
                    spec, [[g[n] for n in names] for g in grads], names=list(names), first_step=step, small=16384,
                    states=[{k: v for k, v in s.items() if k.rpartition(".")[0] in names} for s in states],
                )  # fmt: skip
                for r in range(world):
                    states[r].update(done.states[r])
                with torch.no_grad():
                    for name, out in zip(names, done.outputs[0], strict=True):
                        here.get_parameter(name).sub_(out, alpha=0.05)
        for (name, a), b in zip(there.named_parameters(), here.parameters(), strict=True):
            torch.testing.assert_close(
                a.detach().cpu(), b.detach(), rtol=2e-2, atol=2e-3, msg=lambda m, n=name, s=spec: f"{s} {n}: {m}"
            )
        flat = torch.cat([p.detach().flatten() for p in there.parameters()])
        other = flat.clone()
        dist.broadcast(other, 0)
        assert torch.equal(flat, other), spec
        sync.close()
    dist.destroy_process_group()


def _grads(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_codecs_are_lockstep_over_nccl() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(codecs_over_nccl, args=(2, folder), nprocs=2)


def train_captured(rank: int, folder: str, spec: str, *, captured: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """Steps with a broken batch, a skipped step and a step of accumulation between others; losses and the end state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96))
    net.append(nn.Conv1d(1, 8, 5)).cuda()
    net[-1].register_forward_pre_hook(lambda _, inputs: (inputs[0][:, None],))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    # A unit for each module: captures of several launches share their memory.
    units = plan.default_plan(ways.shapes_of(net), compress=spec, group_bytes=0)
    assert len(units.units) == 4
    sync = syncline.attach(net, optimizer, plan=units, capture=captured, sentinel=7)
    losses = []
    for step in range(16):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        if step == 9 and rank == 1:
            x[0, 0] = torch.nan
        with sync.no_sync() if step == 5 else nullcontext():
            loss = net(x).square().mean()
            loss.backward()
        if step == 9:  # averages are broken, and replaced by hand: residuals must stay as they were
            for p in net.parameters():
                p.grad = torch.full_like(p, 1e-3)
        if step == 12:  # a skipped step
            optimizer.zero_grad()
        elif step != 5:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    state = {name: tensor.cpu() for name, tensor in sync.state_dict().items()}
    state |= {name: p.detach().cpu() for name, p in net.named_parameters()}
    about = sync.plan.about.get("capture", "")
    sync.close()
    return (torch.stack(losses).cpu(), about), state


def captured_over_nccl(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    streams.EARLY_PASSES = 2
    for spec in ("powersgd(rank=2)", "powersgd(rank=4) | bf16", "acpsgd(rank=2)"):
        (losses, _), eager = train_captured(rank, folder, spec, captured=False)
        (again, about), state = train_captured(rank, folder, spec, captured=True)
        if rank == 0:
            print(spec, about)
        units = about.partition(" of ")[2].partition(" ")[0]
        assert about.startswith("0 of" if spec.startswith("acp") else f"{units} of {units}"), about
        assert torch.equal(losses[:9], again[:9]), spec
        assert torch.equal(losses.nan_to_num(), again.nan_to_num()), spec
        assert state.keys() == eager.keys()
        for name, tensor in state.items():
            assert tensor.isfinite().all(), f"{spec} {name}"
            assert torch.equal(tensor, eager[name]), f"{spec} {name}"
    dist.destroy_process_group()


def test_captured_launches_are_eager_launches_over_nccl() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(captured_over_nccl, args=(2, folder), nprocs=2)


def lose_a_peer(rank: int, world: int, folder: str, how: str) -> None:
    join(rank, world, folder)
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.attach(model, optimizer, timeout=5)
    began = 0.0
    try:
        for step in range(400):
            if rank == 1 and step == 5:
                Path(folder, "fired").write_text(how)
                os._exit(9) if how == "dies" else time.sleep(40)
                os._exit(9)
            if rank == 0 and step == 5:
                began = time.monotonic()
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            float(model.weight.detach().sum())
        text = "no error"
    except PeerError as error:
        text = f"PeerError {error.ranks} {error}"
    except Exception as error:
        text = f"{type(error).__name__} {error}"
    Path(folder, "said").write_text(f"{time.monotonic() - began:.1f} s: {text}")
    os._exit(0)


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_lost_peer_is_named_over_nccl(how: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(lose_a_peer, args=(2, folder, how), nprocs=2, join=False)
        assert context is not None
        limit = time.monotonic() + 60
        while not Path(folder, "said").exists() and time.monotonic() < limit and context.processes[0].is_alive():
            time.sleep(0.5)
        threading.Event().wait(1.0)
        for process in context.processes:
            process.kill()
        assert Path(folder, "fired").read_text() == how
        said = Path(folder, "said").read_text() if Path(folder, "said").exists() else "nothing"
        print(said)
        assert "PeerError (1,)" in said, said


def freeze_on_one_rank(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = syncline.attach(model, optimizer, timeout=30)
    began, text = 0.0, "no error"
    try:
        for step in range(400):
            if step == 2:
                assert sync.plan.executor == "reducer"
                began = time.monotonic()
                model[0].requires_grad_(rank == 0)
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            float(model[1].weight.detach().sum())
    except Exception as error:
        text = f"{type(error).__name__} {error}"
    Path(folder, f"said-{rank}").write_text(json.dumps((time.monotonic() - began, text)))
    os._exit(0)


def test_freezing_on_one_rank_is_named_on_both_at_once_over_nccl() -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(freeze_on_one_rank, args=(2, folder), nprocs=2, join=False)
        assert context is not None
        for process in context.processes:
            process.join(60)
            process.kill()
        said = [json.loads(Path(folder, f"said-{rank}").read_text()) for rank in range(2)]
        print(said)
        for seconds, text in said:
            assert text.startswith("UsageError"), text
            assert "rank 1 froze '0.weight', '0.bias', and rank 0 did not" in text
            assert seconds < 10
