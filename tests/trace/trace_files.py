"""Trace files for tests: the committed fixtures, and small ones written by hand."""

import gzip
import json
from pathlib import Path

from syncline.trace.formats.chrome_write import chrome_events, chrome_head

FIXTURES = Path(__file__).parent / "fixtures"
GLOO = [FIXTURES / f"gloo-rank{rank}.json.gz" for rank in (0, 1)]
NCCL = [FIXTURES / f"nccl-rank{rank}.json.gz" for rank in (0, 1)]
HOROVOD = FIXTURES / "horovod-timeline.json"


def chrome_trace(trace):
    """A trace as Chrome's JSON object."""
    return {**chrome_head(trace), "traceEvents": list(chrome_events(trace))}


def raw(path):
    """A fixture as the standard library reads it."""
    return json.loads(gzip.decompress(path.read_bytes()))


def device_work(path):
    """What a fixture's GPU did, (start, end) in microseconds: NCCL's kernels, and other kernels. Copies are neither.

    Kernels that were launched before the profile have no launch, and do not count.
    """
    events = [e for e in raw(path)["traceEvents"] if e.get("ph") == "X"]
    launched = {e["args"].get("correlation") for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    kernels = [e for e in events if e.get("cat") == "kernel" and e["args"]["correlation"] in launched]
    rows = [(e["name"].startswith("nccl"), (e["ts"], e["ts"] + e["dur"])) for e in kernels]
    return sorted(row for nccl, row in rows if nccl), sorted(row for nccl, row in rows if not nccl)


def hidden_share(transfers, work):
    """The share of the transfers' time under the work; kernels of one stream follow one another."""
    whole = sum(end - start for start, end in transfers)
    under = sum(max(0.0, min(e, to) - max(s, at)) for s, e in transfers for at, to in work)
    return under / whole


def kineto(path, events, *, rank=0, world=1, host="a", base=1_000_000_000):
    """Write a torch.profiler trace; returns its path."""
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    header = {"schemaVersion": 1, "distributedInfo": info, "host_name": host, "baseTimeNanoseconds": base}
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


def host(name, start, end, *, cat="cpu_op", tid=7, **args):
    """An event of a thread, in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": end - start, "args": args}


def kernel(name, start, end, correlation, *, stream=7, **args):
    """A kernel, in microseconds."""
    args = {"correlation": correlation, "stream": stream, **args}
    return {**host(name, start, end, cat="kernel", tid=stream), "pid": 0, "args": args}


def launch(at, correlation, *, tid=7):
    """The launch of a kernel."""
    return host("cudaLaunchKernel", at, at + 1, cat="cuda_runtime", tid=tid, correlation=correlation)


def lanes(spans):
    """Lane, start and end in microseconds, from the first span on."""
    origin = min(span.start for span in spans)
    return [(span.lane, (span.start - origin) / 1000, (span.end - origin) / 1000) for span in spans]
