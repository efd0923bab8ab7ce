"""Records torch.profiler traces of loops on a CUDA device: `python tests/trace/make_gpu_fixtures.py --out FOLDER`.

Each loop has one known cause of slowness, or none. `--steps` of them are profiled; `cut` makes the small traces under
`fixtures/` from them. `steps.json` has the step times without the profiler.
"""

import argparse
import gzip
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from syncline.cluster.gpu import mps_daemon

FEATURES = 16  # of a token: inputs are small, so that copies of them take no time
WARMUP, WORLD = 12, 2  # DDP synchronises in its first ten steps, to log times
KEPT_ARGS = frozenset(
    {"correlation", "stream", "Input Dims", "Input type", "Collective name", "In msg nelems", "Out msg nelems", "dtype",
     "Group size", "Process Group Name", "Process Group Ranks", "Seq", "External id"}
)  # fmt: skip
KEPT_CATEGORIES = frozenset(
    {"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"}
)


class Batches(Dataset):
    """Whole batches; `delay` makes the loader slow."""

    def __init__(self, count, shape, *, delay=0.0):
        self.count, self.shape, self.delay = count, shape, delay

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError
        time.sleep(self.delay)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(index))


class Tiny(nn.Sequential):
    """Many kernels of a few microseconds each: the host cannot launch them fast enough."""

    def __init__(self, layers=12):
        super().__init__(*(layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())))


class Block(nn.Module):
    """Attention and a perceptron, as in a transformer."""

    def __init__(self, width, heads=16):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        made = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(-2))

    def forward(self, x, checked):
        x = checked(self.attend(x))
        return checked(x + self.mlp(self.norms[1](x)))


class Transformer(nn.Module):
    """Attention and large products; with `check`, every result and gradient is checked for NaN on the host."""

    def __init__(self, *, check=False, layers=6, width=1024):
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks, self.check = nn.ModuleList(Block(width) for _ in range(layers)), check

    def checked(self, x):
        if self.check:
            finite(x)
            x.register_hook(finite)
        return x

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.checked)
        return x


def finite(x):
    if not torch.isfinite(x).all():
        raise ValueError("not finite")


LOOPS = {
    "healthy": (Transformer, (48, 512, FEATURES), {}),
    "sync-bound": (lambda: Transformer(check=True), (48, 512, FEATURES), {"copies": True}),
    "host-bound": (Tiny, (32, 64), {}),
    "input-bound": (Transformer, (8, 512, FEATURES), {"delay": 0.05}),
}


def loop(model, data, steps, each, *, copies=False):
    """Train; `each` is called after every step. `copies`: a blocking copy of the output to the host in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    batches = iter(data)
    for _ in range(steps):
        x = next(batches).to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        loss = y.float().square().mean()
        if copies:
            y.detach()[:, 0].float().cpu()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        each()


def step_time(model, data, steps, **options):
    """Milliseconds per step without a profiler, the mean after the first steps."""
    ends = []

    def each():
        # The host runs ahead of the GPU, so only the time between two synchronised moments counts.
        if len(ends) + 1 in (WARMUP, steps):
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    loop(model, data, steps, each, **options)
    return (ends[-1] - ends[WARMUP - 1]) * 1e3 / (steps - WARMUP)


def graphed_step_time(model, shape, steps):
    """Milliseconds per step of the same training, replayed as one CUDA graph: the host launches once per step."""
    x = torch.randn(shape, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, capturable=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / steps


def record(model, data, steps, path, **options):
    """Profile the last `steps` of the loop."""
    plan = schedule(wait=WARMUP - 2, warmup=2, active=steps)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=plan, record_shapes=True) as profiler:
        loop(model, data, WARMUP + steps, profiler.step, **options)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 6, mtime=0))
    path.unlink()


def single(name, out, steps):
    """One loop in one process; returns its milliseconds per step."""
    make, shape, options = LOOPS[name]
    delay = options.get("delay", 0.0)
    more = {"copies": options.get("copies", False)}
    torch.manual_seed(0)
    model = make().cuda()

    def data():
        loader = DataLoader(Batches(999, shape, delay=delay), batch_size=None)
        return loader if delay else 16 * [batch.pin_memory() for batch, _ in zip(loader, range(4), strict=False)]

    record(model, data(), steps, out / f"{name}.json", **more)
    return step_time(model, data(), WARMUP + (10 if delay else 30), **more)


def ranks(rank, folder, out, steps):
    """DDP on two NCCL ranks that share the GPU as two hosts."""
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer(layers=3).cuda(), bucket_cap_mb=8)
    data = [batch.pin_memory() for batch in DataLoader(Batches(30, (32, 512, FEATURES)), batch_size=None)]
    record(model, data, steps, Path(out) / f"ddp-rank{rank}.json")
    dist.destroy_process_group()


def cut(source, target, *, steps):
    """The first `steps` profiled steps of a trace, with the events and fields that readers use."""
    trace = json.loads(gzip.decompress(Path(source).read_bytes()))
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in KEPT_CATEGORIES]
    on_device = [e for e in events if e["cat"].startswith(("kernel", "gpu_"))]
    on_host = [e for e in events if not e["cat"].startswith(("kernel", "gpu_"))]
    end = sorted(e["ts"] + e["dur"] for e in on_host if e["name"].startswith("ProfilerStep#"))[steps - 1]
    later = correlations(e for e in on_host if e["ts"] >= end)
    on_host = list(outermost([e for e in on_host if e["ts"] < end]))
    on_device = [e for e in on_device if e["args"]["correlation"] not in later]
    for event in (*on_host, *on_device):
        event["args"] = {key: value for key, value in event.get("args", {}).items() if key in KEPT_ARGS}
        event["name"] = event["name"][:160]
        if event["cat"] == "cpu_op" and not event["name"].startswith(("c10d::", "record_param_comms")):
            del event["args"]
    header = {k: trace[k] for k in ("schemaVersion", "distributedInfo", "baseTimeNanoseconds") if k in trace}
    text = json.dumps({**header, "traceEvents": [*on_host, *on_device]}, separators=(",", ":"))
    Path(target).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def correlations(events):
    """The numbers that tie calls of the host to kernels."""
    return {e["args"]["correlation"] for e in events if "correlation" in e.get("args", {})}


def outermost(events):
    """The events without operators of torch that lie inside others of their thread."""
    ends = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["name"].startswith("aten::"):
            if event["ts"] + event["dur"] <= ends.get(event["tid"], 0):
                continue
            ends[event["tid"]] = event["ts"] + event["dur"]
        yield event


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=[*LOOPS, "ddp"], default=[*LOOPS, "ddp"])
    parser.add_argument("--cut", nargs=2, metavar=("TRACE", "STEPS"), help="cut this trace instead of recording")
    chosen = parser.parse_args()
    if chosen.cut:
        cut(chosen.cut[0], chosen.out, steps=int(chosen.cut[1]))
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
        found = {}
        for loop_name in LOOPS:
            if loop_name in chosen.only:
                found[loop_name] = single(loop_name, chosen.out, chosen.steps)
        if "host-bound" in chosen.only:
            found["host-bound, as a CUDA graph"] = graphed_step_time(Tiny().cuda(), LOOPS["host-bound"][1], 100)
        (chosen.out / "steps.json").write_text(json.dumps({"device": torch.cuda.get_device_name(), "ms": found}))
        if "ddp" in chosen.only:
            with mps_daemon() as environment:
                os.environ.update(environment, CUDA_DEVICE_MAX_CONNECTIONS="32")
                mp.spawn(ranks, args=(str(chosen.out), str(chosen.out), chosen.steps), nprocs=WORLD)
            (chosen.out / "store").unlink(missing_ok=True)
