"""Speed, compression ratio and error of codecs, measured on one rank.

Times are relative to a copy of the same tensor in the same run: encoding, decoding one rank's payload, and everything
that one rank computes in a step, error feedback included.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline import codecs
from syncline.bench.output import Countdown, environment
from syncline.bench.timing import Clock, copy_time, inputs, summarize
from syncline.codecs.requests import answer, lower

# 64 kB to 400 MB of float32, as matrices, so that low-rank codecs have factors.
SHAPES = ((128, 128), (512, 512), (2048, 2048), (10_000, 10_000))
ERROR_SHAPE = (128, 128)
# Codecs that need arguments.
NEEDS = {"warmup": "warmup(topk(0.01), steps=1)"}


def specs() -> list[str]:
    """Every registered codec with its defaults."""
    return [NEEDS.get(name, name) for name in codecs.available()]


def step(
    codec: codecs.Codec, grad: Tensor, state: Any, number: int, clock: Clock
) -> tuple[codecs.Result, dict[str, float]]:
    """Run one step of one rank, with its own payload as the answer of the network; the result, and milliseconds.

    If a coder encodes the gradient, only the coder is timed. In other codecs, everything until the first payload is
    ready counts as encoding, and the rest as decoding.
    """
    clock.keep_busy()
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
    return now, {"encode_ms": encode, "decode_ms": decode, "step_ms": clock.between(began, ended)}


def speed(spec: str, grads: Sequence[Tensor], *, budget_s: float, most: int = 20) -> dict[str, Any]:
    """Times of consecutive steps that alternate between the gradients, without the first two steps."""
    codec = codecs.build(spec)
    clock = Clock(grads[0].device)
    state: Any = None
    steps: list[dict[str, float]] = []
    began = time.perf_counter()
    # Large step numbers, so that the warm-up of a codec is over.
    while len(steps) < 5 or (len(steps) < most and time.perf_counter() - began < budget_s):
        number = len(steps)
        result, times = step(codec, grads[number % len(grads)], state, (1 << 20) + number, clock)
        state = result.state
        steps.append(times)
    return {part: summarize([times[part] for times in steps[2:]]) for part in steps[0]}


def error(spec: str, steps: int, device: torch.device) -> float:
    """|sum of outputs - sum of gradients| / |sum of gradients| after `steps` steps: error feedback makes it shrink.

    Each gradient is a fixed direction plus new noise of the same size, similar to gradients within an epoch.
    """
    codec = codecs.build(spec)
    clock = Clock(device)
    generator = torch.Generator().manual_seed(1)
    fixed = torch.randn(ERROR_SHAPE, generator=generator)
    state: Any = None
    truth, sent = torch.zeros(ERROR_SHAPE), torch.zeros(ERROR_SHAPE)
    for number in range(steps):
        grad = fixed + torch.randn(ERROR_SHAPE, generator=generator)
        result, _ = step(codec, grad.to(device), state, number, clock)
        state = result.state
        truth += grad
        sent += result.output.cpu()
    return float((sent - truth).norm() / truth.norm())


def measure(
    device: torch.device,
    *,
    names: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    budget_s: float = 0.5,
    error_steps: Sequence[int] = (1, 100),
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """One row for each codec and size."""
    rows = []
    chosen = list(names) if names is not None else specs()
    errors = {spec: {str(n): error(spec, n, torch.device("cpu")) for n in error_steps} for spec in chosen}
    sizes = shapes or SHAPES
    parts = Countdown(len(sizes) * len(chosen), progress or (lambda text: None))
    for shape in sizes:
        count = shape[0] * shape[1]
        grads = inputs(shape, device, most=4)
        copied = copy_time(device, grads, budget_s=budget_s)
        for spec in chosen:
            row: dict[str, Any] = {"codec": spec, "shape": list(shape), "bytes": 4 * count, "error": errors[spec]}
            row["wire_ratio"] = 4 * count / codecs.build(spec).wire_bytes(shape)
            row |= speed(spec, grads, budget_s=budget_s)
            row["copy_ms"] = copied
            for part in ("encode", "decode", "step"):
                row[f"{part}_of_copy"] = copied["median"] / max(1e-6, row[f"{part}_ms"]["median"])
            rows.append(row)
            parts.part_done(f"{spec}, tensors of {4 * count / 1e6:.3g} MB")
        del grads
    return {"environment": environment(device), "rows": rows}
