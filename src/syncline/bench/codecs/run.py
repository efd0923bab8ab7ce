"""`bench codecs`: how fast every codec encodes and decodes, what it puts on the wire, and how far off it is.

Times are fractions of a copy of the same tensor in the same run: of writing the payload (encode), of reading one
rank's payload back (decode), and of all that one rank computes in a step, error feedback included. Also runnable
alone, where only torch is installed: `python -m syncline.bench.codecs.run --device cuda --out FILE`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline import codecs
from syncline.bench.codecs import checks, operators
from syncline.bench.codecs import page as plot
from syncline.bench.timing import Clock, copy_time, environment, summarize
from syncline.codecs.requests import answer, lower

# 64 kB to 400 MB of float32, as matrices, so that low-rank codecs have factors.
SHAPES = ((128, 128), (512, 512), (2048, 2048), (10_000, 10_000))
ERROR_SHAPE = (128, 128)
# Values, for the operators: the plain reference is slow on a CPU.
DEFAULT_COUNTS = {"cuda": "4194304,100000000", "cpu": "262144,16777216"}
# What a codec needs to be built without choices of the user's.
NEEDS = {"warmup": "warmup(topk(0.01), steps=1)"}


def specs() -> list[str]:
    """Every registered codec with its defaults."""
    return [NEEDS.get(name, name) for name in codecs.available()]


class Step(NamedTuple):
    """One step of one rank alone, and its milliseconds."""

    result: codecs.Result
    encode: float
    decode: float
    whole: float


def step(codec: codecs.Codec, grad: Tensor, state: Any, number: int, clock: Clock) -> Step:
    """Run it with the rank's own payload as the answer.

    Where a coder writes the gradient, the coder is timed alone; in other codecs what comes before the first payload
    is ready counts as encoding, and what follows as decoding.
    """
    clock.plug()
    began = clock.mark()
    ready: Any = None
    coding: list[tuple[Any, Any, Any]] = []
    run = codec.run(step=number)
    now = run.start(grad, state)
    while not isinstance(now, codecs.Result):
        if isinstance(now, codecs.Gather):
            ready = ready or clock.mark()
            now = run.resume([now.payload])
            continue
        merge = lower(now)
        first = clock.mark()
        payload = merge.coder.encode(merge.tensor, seed=merge.seed)
        middle = clock.mark()
        ready = ready or middle
        mean = merge.coder.decode(payload, merge.tensor.numel(), seed=merge.seed)
        if not merge.coder.adds:
            coding.append((first, middle, clock.mark()))
        now = run.resume(answer(now, codecs.Out(mean, mean)))
    ended = clock.mark()
    marks = coding or [(began, ready or ended, ended)]
    encode = sum(clock.between(a, b) for a, b, _ in marks)
    decode = sum(clock.between(b, c) for _, b, c in marks)
    return Step(now, encode, decode, clock.between(began, ended))


def speed(spec: str, grads: Sequence[Tensor], *, budget_s: float, most: int = 20) -> dict[str, Any]:
    """Times of steps in a row on gradients in turn; the first two are not counted."""
    codec = codecs.build(spec)
    clock = Clock(grads[0].device)
    state: Any = None
    steps: list[Step] = []
    began = time.perf_counter()
    # Late steps: past every warm-up that a codec may have.
    while len(steps) < 5 or (len(steps) < most and time.perf_counter() - began < budget_s):
        number = len(steps)
        steps.append(step(codec, grads[number % len(grads)], state, (1 << 20) + number, clock))
        state = steps[-1].result.state
        steps[-1] = steps[-1]._replace(result=codecs.Result(torch.empty(0)))  # or memory fills with outputs
    kept = steps[2:]
    return {
        "encode_ms": summarize([s.encode for s in kept]).as_dict(),
        "decode_ms": summarize([s.decode for s in kept]).as_dict(),
        "step_ms": summarize([s.whole for s in kept]).as_dict(),
    }


def error(spec: str, steps: int, device: torch.device) -> float:
    """|sum of outputs - sum of gradients| / |sum of gradients| after so many steps: feedback makes it shrink.

    Gradients are one fixed direction and as much fresh noise, as training's are between two epochs.
    """
    codec = codecs.build(spec)
    clock = Clock(device)
    generator = torch.Generator().manual_seed(1)
    fixed = torch.randn(ERROR_SHAPE, generator=generator)
    state: Any = None
    truth, sent = torch.zeros(ERROR_SHAPE), torch.zeros(ERROR_SHAPE)
    for number in range(steps):
        grad = fixed + torch.randn(ERROR_SHAPE, generator=generator)
        result = step(codec, grad.to(device), state, number, clock).result
        state = result.state
        truth += grad
        sent += result.output.cpu()
    return float((sent - truth).norm() / truth.norm())


def measure(
    device: torch.device,
    *,
    names: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    budget_s: float = 0.5,
    error_steps: Sequence[int] = (1, 100),
) -> dict[str, Any]:
    """A row for each codec and size. What a codec cannot do is its row's `failed`, in its own words."""
    rows = []
    chosen = list(names) if names is not None else specs()
    errors = {spec: {str(n): error(spec, n, torch.device("cpu")) for n in error_steps} for spec in chosen}
    for shape in shapes:
        count = shape[0] * shape[1]
        copies = max(1, min(4, (1 << 28) // (4 * count)))
        generator = torch.Generator(device=device).manual_seed(0)
        grads = [torch.randn(shape, device=device, generator=generator) for _ in range(copies)]
        copied = copy_time(device, grads, budget_s=budget_s)
        for spec in chosen:
            row: dict[str, Any] = {"codec": spec, "shape": list(shape), "bytes": 4 * count, "error": errors[spec]}
            row["wire_ratio"] = 4 * count / codecs.build(spec).wire_bytes(shape)
            row |= speed(spec, grads, budget_s=budget_s)
            row["copy_ms"] = copied.as_dict()
            for part in ("encode", "decode", "step"):
                row[f"{part}_of_copy"] = copied.median / max(1e-6, row[f"{part}_ms"]["median"])
            rows.append(row)
        del grads
    return {"environment": environment(device), "rows": rows}


HEADINGS = (
    "codec",
    "size",
    "encode ms",
    "decode ms",
    "encode/copy",
    "decode/copy",
    "step/copy",
    "wire ratio",
    "error 1",
    "error 100",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of `HEADINGS`."""
    errors = list(row["error"].values())
    return [
        row["codec"],
        plot.size(row["bytes"]),
        f"{row['encode_ms']['median']:.3f}",
        f"{row['decode_ms']['median']:.3f}",
        f"{row['encode_of_copy']:.1%}",
        f"{row['decode_of_copy']:.1%}",
        f"{row['step_of_copy']:.1%}",
        f"{row['wire_ratio']:.1f}",
        *(f"{e:.3f}" for e in errors),
    ]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text in columns, for a machine without rich."""
    widths = [max(len(h), *(len(r[i]) for r in rows)) for i, h in enumerate(headings)]
    lines = ["  ".join(h.ljust(w) for h, w in zip(headings, widths, strict=True))]
    lines += [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows
    ]
    return "\n".join(lines)


def rich_table(result: dict[str, Any], *, width: int = 120) -> Any:
    """The same table for a terminal, without the times where it is narrow; needs rich."""
    from rich.table import Table

    out = Table(title="codecs, as fractions of a copy of the same tensor", box=None, pad_edge=False)
    shown = [i for i, heading in enumerate(HEADINGS) if width >= 110 or not heading.endswith(" ms")]
    for i in shown:
        short = HEADINGS[i].replace("code/", "c/").replace("wire ", "").replace("error", "err")
        out.add_column(short, justify="right" if i else "left", no_wrap=i > 0)
    for row in result["rows"]:
        texts = cells(row)
        out.add_row(*(texts[i] for i in shown))
    return out


def operator_table(rows: Sequence[dict[str, Any]]) -> str:
    """Operators: time, fraction of copy speed by least bytes, of copy time, fused against plain."""
    headings = ("operator", "values", "ms", "issue ms", "plain ms", "GB/s", "copy speed", "copy time", "fused/plain")
    lines = [
        [
            r["operator"],
            f"{r['count'] / 1e6:.1f} M",
            f"{r['fused_ms']['median']:.4f}",
            f"{r['fused_ms']['issue']:.4f}",
            f"{r['plain_ms']['median']:.4f}",
            f"{r['least_gb_s']:.0f}",
            f"{r['of_copy']:.1%}",
            f"{r['of_copy_time']:.1%}",
            f"{r['fused_over_plain']:.1f}x",
        ]
        for r in rows
    ]
    return table(headings, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure operators and codecs, print tables, write JSON and a page; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.codecs.run", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file; a page with the plot is written beside it")
    parser.add_argument("--counts", help="values, for the operators; 4194304,100000000 on CUDA")
    parser.add_argument("--codecs", help="comma list of specs; all by default, '' for none")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds a measurement")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--no-checks", action="store_true", help="skip the comparison with the reference")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    counts = [int(c) for c in (options.counts or DEFAULT_COUNTS[device.type]).split(",")]
    result: dict[str, Any] = {"environment": environment(device)}
    wrong = [] if options.no_checks else checks.run(device)
    result["wrong"] = wrong
    print("\n".join(wrong) or f"checks: {'skipped' if options.no_checks else 'all operators agree with the reference'}")
    result["operators"] = []
    for count in counts:
        result["operators"] += operators.speed(device, count, budget_s=options.budget)
    if device.type == "cuda":
        result["variants"] = operators.variants(device, max(counts), budget_s=options.budget / 2)
        result["many_small"] = operators.many_small(device)
    if options.codecs != "":
        from syncline.spec import split

        names = split(options.codecs) if options.codecs else None
        result |= measure(device, names=names, budget_s=options.budget)
        print(table(HEADINGS, [cells(row) for row in result["rows"]]))
    for trial in result.get("variants", []):
        print(trial["operator"].ljust(16), "  ".join(f"{k} {v:.4f}" for k, v in trial["ms"].items()))
    if "many_small" in result:
        print("many small tensors:", result["many_small"])
    print(operator_table(result["operators"]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        if "rows" in result:
            options.out.with_suffix(".html").write_text(plot.page(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
