"""A program for a sandbox: ranks train with `attach` until one of them is lost; it reports how the others ended.

    python engine_ranks.py '{"ranks": 3, "nodes": true, "victim": 1, "fault": "port down", "step": 7, "timeout": 4}'

With `nodes`, each rank has a node of its own, rank 0 serves a TCPStore as under torchrun, and no rank sees the others
in /proc, as on several machines. Without, all are plain local ranks. Prints one JSON object.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from links import WAYS, cut
from sandbox import folder_of_this_process, send
from torch import nn

import syncline
from syncline.cluster import Cluster, enter
from syncline.cluster.run import rendezvous
from syncline.engine.health import peers
from syncline.plan import Shape, default_plan

PATIENCE_S = 100.0
HOLDS_GIL = "holds the GIL"
"""A fault inside the victim: no thread of it runs any more, the heartbeat included."""


def join(rank: int, case: dict[str, Any], cluster: Cluster | None, folder: str) -> None:
    """Make the process group of torch, whose own timeout is long: the engine's counts."""
    timeout = timedelta(seconds=60)
    if cluster is None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(f"{folder}/store", case["ranks"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case["ranks"], timeout=timeout)
        return
    enter(cluster.nodes[rank])
    os.environ.update(rendezvous(cluster, rank=rank))
    real = peers.this_process
    peers.this_process = lambda: replace(real(), machine=f"machine {rank}", host=f"node{rank}")
    dist.init_process_group("gloo", timeout=timeout)


def train(rank: int, case: dict[str, Any], output: int) -> None:
    """Train until an error comes, and report it. Rank 0 reports its steps, so that the fault can come at its step."""
    torch.set_num_threads(1)
    dist.barrier()  # within torch's timeout: ranks do not start at the same moment
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    shapes = [Shape(name, tuple(p.shape)) for name, p in net.named_parameters()]
    plan = default_plan(shapes, compress=case.get("codec"), group_bytes=0)
    sync = syncline.attach(net, optimizer, plan=plan, timeout=case["timeout"])
    ended: dict[str, Any] = {"rank": rank}
    try:
        for step in range(1_000_000):
            generator = torch.Generator().manual_seed(100 * step + rank)
            F.mse_loss(net(torch.randn(8, 12, generator=generator)), torch.zeros(8, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                _say(output, step=step)
            if rank == case["victim"] and step == case["step"] and case["fault"] == HOLDS_GIL:
                _say(output, fired=time.monotonic())
                ctypes.PyDLL(None).sleep(int(PATIENCE_S))
    except BaseException as error:
        ended |= {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}
        ended["at"] = time.monotonic()
    sync.close()
    # A thread inside a call of a store that does not answer can only end with the process.
    left = [t.name for t in threading.enumerate() if t.name.startswith("syncline") and "peers" not in t.name]
    _say(output, **ended, closed=time.monotonic(), threads=left)


def _say(output: int, **what: Any) -> None:
    os.write(output, json.dumps(what).encode() + b"\n")


def main(case: dict[str, Any]) -> None:
    """Start the ranks, let the fault happen at its step, and wait for the others' ends."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(case["ranks"], bandwidth="1Gbit")) if case["nodes"] else None
        folder = stack.enter_context(folder_of_this_process())
        source, sink = os.pipe()
        pids: list[int] = []
        for rank in range(case["ranks"]):
            pid = os.fork()
            if pid == 0:
                os.close(source)
                join(rank, case, cluster, folder)
                train(rank, case, sink)
                sys.exit(0)  # as a script ends: callbacks, threads, destructors
            pids.append(pid)
        os.close(sink)
        print(json.dumps(_watch(source, pids, case)))


def _watch(source: int, pids: list[int], case: dict[str, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"fired": None, "ranks": {}, "ends": {}}
    reader = threading.Thread(target=_read, args=(source, pids[case["victim"]], case, done), daemon=True)
    reader.start()
    # A vanished host is alive, and must notice that it is alone.
    expected = set(range(case["ranks"])) - (set() if case["fault"] in WAYS else {case["victim"]})
    deadline = time.monotonic() + PATIENCE_S
    while not expected <= done["ends"].keys() and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            done["ends"][pids.index(pid)] = (time.monotonic(), os.waitstatus_to_exitcode(status))
        else:
            time.sleep(0.02)
    for rank in set(range(case["ranks"])) - done["ends"].keys():
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    reader.join(10)
    return done


def _read(source: int, victim: int, case: dict[str, Any], done: dict[str, Any]) -> None:
    """Read what the ranks report; let the fault happen when rank 0 has made its step."""
    with os.fdopen(source) as lines:
        for line in lines:
            said = json.loads(line)
            if said.get("step") == case["step"]:
                if case["fault"] in WAYS:
                    done["fired"] = cut(case["fault"], victim=victim, owner=os.getpid())
                elif case["fault"] != HOLDS_GIL:
                    done["fired"] = time.monotonic()
                    send(victim, signal.Signals[case["fault"]])
            elif "fired" in said:
                done |= said
            elif "rank" in said:
                done["ranks"][said["rank"]] = said


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(json.loads(sys.argv[1]))
