"""Errors of codecs on the gradients of several models while they train, as `compress="auto"` measures them.

    python scripts/codec_errors.py --out benchmarks/results/codec-errors-cpu.json

One rank trains without compression. At some steps, the gradients of three steps in a row go through each codec.
"""

import argparse
import json
from pathlib import Path

import torch

from syncline.bench.output import environment
from syncline.engine.tuning.error_watch import STEPS
from syncline.engine.tuning.measure_errors import codec_error
from syncline.files import write_text
from syncline.train.workload import build, load_optimizer

JOBS = (
    ("vgg11(width=0.5)", "fashion-mnist", "sgd(lr=0.05, momentum=0.9)"),
    ("mlp", "fashion-mnist", "sgd(lr=0.02, momentum=0.9)"),
    ("mlp", "fashion-mnist", "adam(lr=0.001)"),
    ("lstm", "auto", ""),
    ("gpt2(size=tiny)", "auto", ""),
)
CODECS = (
    "int8", "int4", "powersgd(rank=64) | bf16", "powersgd(rank=16) | bf16", "powersgd(rank=4) | bf16", "terngrad",
    "topk(0.01)",
)  # fmt: skip
MEASURED_AT = (5, 20, 60)


def rows_of(model: str, data: str, optimizer: str, *, batch: int) -> list[dict]:
    """Train one model, and measure all codecs at each of the steps."""
    workload = build(model, data)
    phase = workload.phases[0]
    numbers = torch.Generator().manual_seed(0)
    stepper = load_optimizer(optimizer or phase.optimizer, phase.module.parameters())
    named = list(phase.module.named_parameters())
    rows: list[dict] = []
    steps: list[list[torch.Tensor]] = []
    for step in range(max(MEASURED_AT) + 1):
        indices = torch.randint(len(workload.train), (batch,), generator=numbers)
        stepper.zero_grad()
        phase.module(*workload.train.batch(indices)).backward()
        steps = [*steps, [p.grad.clone() for _, p in named]][-STEPS:]
        stepper.step()
        if step not in MEASURED_AT:
            continue
        for codec in CODECS:
            found = [codec_error(codec, [grads[at] for grads in steps], name=n) for at, (n, _) in enumerate(named)]
            whole = sum(energy for energy, _ in found)
            first = [float(grad.norm() ** 2) for grad in steps[0]]
            one = sum(e.one_step * norm for (_, e), norm in zip(found, first, strict=True)) / sum(first)
            row = {"model": model, "optimizer": optimizer or phase.optimizer, "step": step, "codec": codec}
            row["error"] = sum(energy * error.with_feedback for energy, error in found) / whole
            row["one_step"], row["worst"] = one, max(error.with_feedback for _, error in found)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Measure all jobs, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = [row for job in JOBS for row in rows_of(*job, batch=given.batch)]
    content = {"environment": environment(torch.device("cpu")), "setting": {"batch": given.batch}, "rows": rows}
    write_text(json.dumps(content, indent=1) + "\n", given.out)


if __name__ == "__main__":
    main()
