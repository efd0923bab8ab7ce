"""Host time of waits for parameters in flight, with the code of two checkouts in turn.

    python scripts/wait_cost.py ../base . --out benchmarks/results/wait-cost-cpu.json

A chain of small layers, every parameter marked as after `optimizer.step()` and its update done: the time to mark all of
them, and the time by which the forward pass is longer than with nothing in flight. Thread time, the least of many
passes, so that other programs do not count.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

LAYERS, PASSES = 100, 60


def measure() -> dict[str, float]:
    """Microseconds per parameter (marks) and per layer (waits in forward)."""
    import torch
    from torch import nn

    from syncline.engine.inflight import wait_on_touch

    try:
        from syncline.engine.inflight.unguarded import guard_process
    except ImportError:
        pass  # an older checkout: every tensor is touched
    else:
        guard_process()
    torch.set_num_threads(1)

    class Done:
        marked = None

        def wait(self) -> None:
            pass

        def done(self) -> bool:
            return True

    model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(LAYERS)))
    x = torch.ones(1, 8)
    plain, marks, waits = [], [], []
    with torch.no_grad():
        for _ in range(PASSES):
            begin = time.thread_time_ns()
            model(x)
            plain.append(time.thread_time_ns() - begin)
            begin = time.thread_time_ns()
            for layer in model:
                ticket = Done()
                for parameter in layer.parameters():
                    wait_on_touch.mark(parameter, ticket)
            marks.append(time.thread_time_ns() - begin)
            begin = time.thread_time_ns()
            model(x)
            waits.append(time.thread_time_ns() - begin)
            assert not any(map(wait_on_touch.is_marked, model.parameters()))
    return {
        "mark_us": min(marks) / 1e3 / (2 * LAYERS),
        "forward_us": (min(waits) - min(plain)) / 1e3 / LAYERS,
    }


def main() -> None:
    """Measure both checkouts in turn; print and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    seen: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for number in range(asked.rounds):
        for name in list(seen)[:: -1 if number % 2 else 1]:
            path = (asked.before if name == "before" else asked.after).resolve() / "src"
            done = subprocess.run(  # noqa: S603 - this script itself
                [sys.executable, __file__, "--measure"], env={**os.environ, "PYTHONPATH": str(path)}, check=True,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            seen[name].append(json.loads(done.stdout))
    rows = {
        kind: {
            name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, rounds in seen.items()
            for values in [[found[kind] for found in rounds]]
        }
        for kind in seen["before"][0]
    }
    result = {"layers": LAYERS, "rounds": asked.rounds, "machine": platform.processor() or platform.machine(), **rows}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        main()
