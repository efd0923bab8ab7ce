"""Speed of the fused operators, relative to a copy and to the plain reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncline.bench.timing import Clock, copy_time, inputs
from syncline.codecs import ops
from syncline.codecs.kernels import pieces, plain, sparse

SEED = 7
RATIO = 0.01


@dataclass(frozen=True)
class Case:
    """One operator on one input: the fused call, the plain call, and the fewest bytes that it must move."""

    name: str
    fused: Callable[[], Any]
    plain: Callable[[], Any]
    least_bytes: int


def cases(x: Tensor) -> Iterator[Case]:
    """Encode and decode of the dense operators, and selection."""
    n = x.numel()
    scale, limit = ops.abs_max(x), torch.full((), 1.0, device=x.device)
    signs, pos, neg = ops.sign_encode(x)
    yield Case("sign encode", lambda: ops.sign_encode(x), lambda: pieces.sign_encode(x, None, False), 4 * n + n // 8)
    yield Case(
        "sign decode",
        lambda: ops.sign_decode(signs, pos, neg, n),
        lambda: pieces.sign_decode(signs, pos, neg, n, None),
        4 * n + n // 8,
    )
    codes = ops.ternary_encode(x, threshold=limit)
    yield Case(
        "tbq encode",
        lambda: ops.ternary_encode(x, threshold=limit),
        lambda: pieces.ternary_encode(x, limit, None, None),
        4 * n + n // 4,
    )
    # The scale depends on every value, so a tensor larger than the cache has to be read twice.
    yield Case(
        "terngrad encode",
        lambda: ops.terngrad_encode(x, scale=ops.abs_max(x), seed=SEED),
        lambda: pieces.ternary_encode(x, x.abs().amax(), SEED, None),
        8 * n + n // 4,
    )
    yield Case(
        "terngrad codes",
        lambda: ops.terngrad_encode(x, scale=scale, seed=SEED),
        lambda: pieces.ternary_encode(x, scale, SEED, None),
        4 * n + n // 4,
    )
    yield Case("moments", lambda: ops.moments(x), lambda: plain.moments(x), 4 * n)
    yield Case(
        "fp16 encode",
        lambda: ops.saturate(x, limit=64480.5, dtype=torch.float16),
        lambda: plain.saturate(x, 64480.5, torch.float16),
        6 * n,
    )
    yield Case(
        "ternary decode",
        lambda: ops.ternary_decode(codes, scale, n),
        lambda: pieces.ternary_decode(codes, scale, n, None),
        4 * n + n // 4,
    )
    for bits in (8, 4):
        packed, scales = ops.quantize_blocks(x, bits=bits)
        least = 4 * n + n * bits // 8 + 4 * scales.numel()
        yield Case(
            f"int{bits} encode",
            partial(ops.quantize_blocks, x, bits=bits),
            partial(pieces.quantize_blocks, x, bits, 256, None, False),
            least,
        )
        yield Case(
            f"int{bits} decode",
            partial(ops.dequantize_blocks, packed, scales, bits=bits, count=n),
            partial(pieces.dequantize_blocks, packed, scales, bits, 256, n),
            least,
        )
    yield Case(
        "qsgd encode",
        lambda: ops.qsgd_encode(x, seed=SEED),
        lambda: pieces.quantize_blocks(x, 4, 512, SEED, True),
        4 * n + n // 2 + 4 * (n // 512),
    )
    natural = ops.natural_encode(x, seed=SEED)
    yield Case(
        "natural encode", lambda: ops.natural_encode(x, seed=SEED), lambda: pieces.natural_encode(x, SEED), 5 * n
    )
    yield Case("natural decode", lambda: ops.natural_decode(natural, n), lambda: pieces.natural_decode(natural), 5 * n)
    yield from _selection(x)


def _selection(x: Tensor) -> Iterator[Case]:
    n = x.numel()
    k = max(1, round(RATIO * n))
    capacity = k + k // 4
    least = 4 * n + 8 * k

    def dgc(select: Callable[..., Any]) -> Any:
        threshold = ops.sampled_threshold(x, ratio=RATIO, seed=SEED)
        return select(x, threshold, capacity)

    yield Case(
        "dgc encode",
        lambda: dgc(lambda x, t, c: ops.compact(x, threshold=t, capacity=c)),
        lambda: dgc(sparse.compact),
        least,
    )
    yield Case("topk encode", lambda: ops.topk(x, k), lambda: sparse.topk(x, k), least)
    values, indices = ops.topk(x, k)
    yield Case(
        "sparse decode",
        lambda: ops.densify(values, indices, n),
        lambda: torch.zeros_like(x).index_put_((indices.long(),), values, accumulate=True),
        4 * n + 8 * k,
    )


def speed(device: torch.device, count: int, *, budget_s: float = 0.3) -> list[dict[str, Any]]:
    """One row per operator: times, speed relative to a copy by fewest bytes, fused against plain torch."""
    sources = inputs(count, device)
    copied = copy_time(device, sources, budget_s=budget_s)
    copy_rate = 8 * count / copied.median
    clock = Clock(device)
    columns = list(zip(*(list(cases(x)) for x in sources), strict=True))
    rows = []
    for column in columns:
        fused = clock.time([case.fused for case in column], budget_s=budget_s)
        plain = clock.time([case.plain for case in column], budget_s=budget_s, most=10)
        rate = column[0].least_bytes / fused.median
        rows.append(
            {
                "operator": column[0].name,
                "count": count,
                "fused_ms": fused.as_dict(),
                "plain_ms": plain.as_dict(),
                "copy_ms": copied.as_dict(),
                "least_gb_s": rate / 1e6,
                "of_copy": rate / copy_rate,
                "of_copy_time": copied.median / fused.median,
                "fused_over_plain": plain.median / fused.median,
            }
        )
    return rows


def many_small(device: torch.device, tensors: int = 200, count: int = 3000) -> dict[str, Any]:
    """One kernel launch for many small tensors against one launch per tensor."""
    parts = [torch.randn(count, device=device) for _ in range(tensors)]
    flat, lengths = ops.concat(parts), [count] * tensors
    clock = Clock(device)
    one = clock.time([lambda: ops.sign_encode(flat, lengths=lengths)])
    each = clock.time([lambda: [ops.sign_encode(p) for p in parts]], most=10)
    return {"tensors": tensors, "count": count, "one_ms": one.median, "each_ms": each.median}


def variants(device: torch.device, count: int, *, budget_s: float = 0.15) -> list[dict[str, Any]]:
    """Times of the Triton kernels with other tile sizes and warps than the built-in ones; CUDA only."""
    from syncline.codecs.kernels import gpu_blocks, gpu_moments, gpu_saturate, gpu_select, gpu_sign, gpu_ternary

    (x,) = inputs(count, device, most=1)
    clock = Clock(device)
    packed, means = gpu_sign.sign_encode(x, None, False)
    pos, neg = means[0].contiguous(), means[1].contiguous()
    limit = torch.full((), 1.0, device=device)
    codes = gpu_ternary.ternary_encode(x, limit, None, None)
    int8, scales = gpu_blocks.quantize_blocks(x, 8, 256, None, False)
    trials: dict[str, Callable[[tuple[int, int]], Any]] = {
        "sign encode": lambda c: gpu_sign.sign_encode(x, None, False, c),
        "sign decode": lambda c: gpu_sign.sign_decode(packed, pos, neg, count, None, c),
        "tbq encode": lambda c: gpu_ternary.ternary_encode(x, limit, None, None, c),
        "terngrad encode": lambda c: gpu_ternary.ternary_encode(x, limit, SEED, None, c),
        "ternary decode": lambda c: gpu_ternary.ternary_decode(codes, limit, count, None, c),
        "int8 encode": lambda c: gpu_blocks.quantize_blocks(x, 8, 256, None, False, c),
        "int8 decode": lambda c: gpu_blocks.dequantize_blocks(int8, scales, 8, 256, count, c),
        "int4 encode": lambda c: gpu_blocks.quantize_blocks(x, 4, 256, None, False, c),
        "compact": lambda c: gpu_select.compact(x, limit * 2.5, count // 50, c),
        "topk": lambda c: gpu_select.topk(x, count // 100, c),
        "moments": lambda c: gpu_moments.moments(x, c),
        "saturate": lambda c: gpu_saturate.saturate(x, 64480.5, torch.float16, c),
    }
    bytes_ = [(256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8)]
    values = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]
    threads = [(512, 1), (1024, 2), (1024, 4), (2048, 4), (4096, 8)]  # 16 or 8 values per thread
    rows = []
    for name, trial in trials.items():
        configs = bytes_ if name.split()[0] in ("sign", "tbq", "terngrad", "ternary") else values
        configs = threads if name in ("compact", "topk") else configs
        times = {c: clock.time([partial(trial, c)], budget_s=budget_s).median for c in configs}
        rows.append({"operator": name, "ms": {f"{a}x{w}": t for (a, w), t in times.items()}})
    return rows
