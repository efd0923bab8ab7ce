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
from syncline.codecs.coder import Payload
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
    codec: codecs.Codec, grad: Tensor, state: Any, number: int, clock: Clock, *, parts: bool = False
) -> tuple[codecs.Result, dict[str, float]]:
    """Run one step of one rank, with its own payload as the answer of the network; the result, and milliseconds.

    `step_ms` is time on the device, `issue_ms` what the host takes to issue the work. With `parts`, also encoding and
    decoding; the marks between them make the step a little longer. If a coder encodes the gradient, only the coder is
    timed. In other codecs, everything until the first payload is ready counts as encoding, and the rest as decoding.
    """
    clock.keep_busy()
    began, issued = clock.mark(), time.perf_counter()
    ready: Any = None
    coding: list[tuple[Any, Any, Any]] = []
    run = codec.run(step=number)
    now = run.start(grad, state)
    while not isinstance(now, codecs.Result):
        if isinstance(now, codecs.Gather):
            ready = ready or (clock.mark() if parts else None)
            now = run.resume([now.payload])
            continue
        merge = lower(now)
        first = clock.mark() if parts else None
        payload, lost = _encoded(merge)
        middle = clock.mark() if parts else None
        ready = ready or middle
        mean = merge.coder.decode(payload, merge.tensor.numel(), seed=merge.seed)
        if parts and not merge.coder.adds:
            coding.append((first, middle, clock.mark()))
        now = run.resume(answer(now, merge.out(mean, lost)))
    issue = (time.perf_counter() - issued) * 1e3
    ended = clock.mark()
    times = {"step_ms": clock.between(began, ended), "issue_ms": issue}
    if parts:
        marks = coding or [(began, ready or ended, ended)]
        times["encode_ms"] = sum(clock.between(a, b) for a, b, _ in marks)
        times["decode_ms"] = sum(clock.between(b, c) for _, b, c in marks)
    return now, times


def _encoded(merge: codecs.Merge) -> tuple[Payload, Tensor | None]:
    """The payload of a request and what it loses, if that is asked for, as an exchange computes them."""
    coder = merge.coder
    if not merge.tracks_loss or coder.writes(merge.tensor.dtype):
        return coder.encode(merge.whole(), seed=merge.seed), None
    return coder.encode_residual(merge.tensor, merge.residual, seed=merge.seed)


def least_bytes(codec: codecs.Codec, shape: Sequence[int]) -> float:
    """The fewest bytes that a step of one rank can move: each tensor once, however often the codec needs it.

    The gradient is read, the payload written and read, the average written. With error feedback the residual is read
    and the new one written.
    """
    values = 4.0 * torch.Size(shape).numel()
    return 2 * values + 2 * codec.wire_bytes(shape) + (2 * values if codec.feedback else 0)


def speed(spec: str, grads: Sequence[Tensor], *, budget_s: float, most: int = 20) -> dict[str, Any]:
    """Times of consecutive steps that alternate between the gradients, without the first two steps.

    Half of the steps are timed in parts; these do not count for the whole.
    """
    codec = codecs.build(spec)
    clock = Clock(grads[0].device)
    state: Any = None
    whole: list[dict[str, float]] = []
    parted: list[dict[str, float]] = []
    began = time.perf_counter()
    # Large step numbers, so that the warm-up of a codec is over.
    for number in range(2 * most):
        if number >= 12 and time.perf_counter() - began >= budget_s:
            break
        in_parts = number // 2 % 2 == 1  # two in a row, because acpsgd alternates
        result, times = step(codec, grads[number % len(grads)], state, (1 << 20) + number, clock, parts=in_parts)
        state = result.state
        (parted if in_parts else whole).append(times)
    rows = {part: [times[part] for times in whole[2:]] for part in ("step_ms", "issue_ms")}
    rows |= {part: [times[part] for times in parted[2:]] for part in ("encode_ms", "decode_ms")}
    return {part: summarize(samples) for part, samples in rows.items()}


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
            row["least_bytes"] = least_bytes(codecs.build(spec), shape)
            # The copy reads and writes 4 bytes per value.
            row["step_of_copy_speed"] = row["step_of_copy"] * row["least_bytes"] / (8 * count)
            rows.append(row)
            parts.part_done(f"{spec}, tensors of {4 * count / 1e6:.3g} MB")
        del grads
    return {"environment": environment(device), "rows": rows}
