"""Speed of the fused operators, relative to a copy and to the plain reference."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncline.bench.timing import Clock, copy_time, inputs
from syncline.codecs import ops
from syncline.codecs.kernels import pieces, plain, sparse

SEED = 7
RATIO = 0.01


class Case(NamedTuple):
    """One operator on one input: the fused call, the plain call, and the fewest bytes that it must move."""

    fused: Callable[[], Any]
    plain: Callable[[], Any]
    least_bytes: int


def cases(x: Tensor) -> dict[str, Case]:
    """Encode and decode of the dense operators, and selection, by name."""
    n = x.numel()
    k = max(1, round(RATIO * n))
    error = x.roll(1)
    scale, limit = ops.abs_max(x), torch.full((), 1.0, device=x.device)
    signs, pos, neg = ops.sign_encode(x)
    codes = ops.ternary_encode(x, threshold=limit)
    natural = ops.natural_encode(x, seed=SEED)
    (int8, scales8), (int4, scales4) = (ops.quantize_blocks(x, bits=bits) for bits in (8, 4))
    values, indices = ops.topk(x, k)

    def threshold() -> Tensor:
        return ops.sampled_threshold(x, ratio=RATIO, seed=SEED)

    fused: dict[str, Callable[[], Any]] = {
        "sign encode": lambda: ops.sign_encode(x),
        "sign decode": lambda: ops.sign_decode(signs, pos, neg, n),
        "sign residual": lambda: ops.sign_residual(x, error),
        "tbq residual": lambda: ops.ternary_residual(x, error, threshold=limit),
        "int8 residual": lambda: ops.quantize_residual(x, error, bits=8),
        "int4 residual": lambda: ops.quantize_residual(x, error, bits=4, block=64),
        "tbq encode": lambda: ops.ternary_encode(x, threshold=limit),
        "terngrad encode": lambda: ops.terngrad(x, clip=2.5, seed=SEED),
        "terngrad codes": lambda: ops.terngrad_encode(x, scale=scale, seed=SEED),
        "moments": lambda: ops.moments(x),
        "fp16 encode": lambda: ops.saturate(x, limit=64480.5, dtype=torch.float16),
        "ternary decode": lambda: ops.ternary_decode(codes, scale, n),
        "int8 encode": lambda: ops.quantize_blocks(x, bits=8),
        "int8 decode": lambda: ops.dequantize_blocks(int8, scales8, bits=8, count=n),
        "int4 encode": lambda: ops.quantize_blocks(x, bits=4),
        "int4 decode": lambda: ops.dequantize_blocks(int4, scales4, bits=4, count=n),
        "qsgd encode": lambda: ops.qsgd_encode(x, seed=SEED),
        "natural encode": lambda: ops.natural_encode(x, seed=SEED),
        "natural decode": lambda: ops.natural_decode(natural, n),
        "dgc encode": lambda: ops.compact(x, threshold=threshold(), capacity=k + k // 4),
        "topk encode": lambda: ops.topk(x, k),
        "sparse decode": lambda: ops.densify(values, indices, n),
    }
    plain_torch: dict[str, Callable[[], Any]] = {
        "sign encode": lambda: pieces.sign_encode(x, None, False),
        "sign decode": lambda: pieces.sign_decode(signs, pos, neg, n, None),
        "sign residual": lambda: pieces.sign_residual(x, error, None, False),
        "tbq residual": lambda: pieces.ternary_residual(x, error, limit, None, None),
        "int8 residual": lambda: pieces.quantize_residual(x, error, 8, 256, None, False),
        "int4 residual": lambda: pieces.quantize_residual(x, error, 4, 64, None, False),
        "tbq encode": lambda: pieces.ternary_encode(x, limit, None, None),
        "terngrad encode": lambda: pieces.terngrad(x, 2.5, SEED, None),
        "terngrad codes": lambda: pieces.ternary_encode(x, scale, SEED, None),
        "moments": lambda: plain.moments(x),
        "fp16 encode": lambda: plain.saturate(x, 64480.5, torch.float16),
        "ternary decode": lambda: pieces.ternary_decode(codes, scale, n, None),
        "int8 encode": lambda: plain.quantize_blocks(x, 8, 256, None, False),
        "int8 decode": lambda: plain.dequantize_blocks(int8, scales8, 8, 256, n),
        "int4 encode": lambda: plain.quantize_blocks(x, 4, 256, None, False),
        "int4 decode": lambda: plain.dequantize_blocks(int4, scales4, 4, 256, n),
        "qsgd encode": lambda: plain.quantize_blocks(x, 4, 512, SEED, True),
        "natural encode": lambda: plain.natural_encode(x, SEED),
        "natural decode": lambda: plain.natural_decode(natural),
        "dgc encode": lambda: sparse.compact(x, threshold(), k + k // 4),
        "topk encode": lambda: sparse.topk(x, k),
        "sparse decode": lambda: torch.zeros_like(x).index_put_((indices.long(),), values, accumulate=True),
    }
    # Bytes of the codes, by the first word; the float32 values are read or written, too.
    codes_bytes = {"sign": n // 8, "tbq": n // 4, "terngrad": n // 4, "ternary": n // 4, "moments": 0, "fp16": 2 * n}
    codes_bytes |= {"int8": n + 4 * scales8.numel(), "int4": n // 2 + 4 * scales4.numel(), "natural": n}
    codes_bytes |= {"qsgd": n // 2 + 4 * (n // 512), "dgc": 8 * k, "topk": 8 * k, "sparse": 8 * k}
    least = {name: 4 * n + codes_bytes[name.split()[0]] for name in fused}
    # The scale depends on every value, so a tensor larger than the cache has to be read twice.
    least["terngrad encode"] += 4 * n
    # The residual is read, and the new one written.
    least |= {name: size + 8 * n for name, size in least.items() if name.endswith("residual")}
    return {name: Case(fused[name], plain_torch[name], least[name]) for name in fused}


def speed(device: torch.device, count: int, *, budget_s: float = 0.3) -> list[dict[str, Any]]:
    """One row per operator: times, speed relative to a copy by fewest bytes, fused against plain torch."""
    sources = inputs([count], device)
    copied = copy_time(device, sources, budget_s=budget_s)
    copy_rate = 8 * count / copied["median"]
    clock = Clock(device)
    by_input = [cases(x) for x in sources]
    rows = []
    for name, case in by_input[0].items():
        fused = clock.time([one[name].fused for one in by_input], budget_s=budget_s)
        plain = clock.time([one[name].plain for one in by_input], budget_s=budget_s, most=10)
        rate = case.least_bytes / fused["median"]
        row = {"operator": name, "count": count, "fused_ms": fused, "plain_ms": plain, "copy_ms": copied}
        row |= {"least_gb_s": rate / 1e6, "of_copy": rate / copy_rate}
        row |= {"of_copy_time": copied["median"] / fused["median"]}
        rows.append(row | {"fused_over_plain": plain["median"] / fused["median"]})
    return rows


def many_small(device: torch.device, tensors: int = 200, count: int = 3000) -> dict[str, Any]:
    """One kernel launch for many small tensors against one launch per tensor."""
    parts = [torch.randn(count, device=device) for _ in range(tensors)]
    flat, lengths = ops.concat(parts), [count] * tensors
    clock = Clock(device)
    one = clock.time([lambda: ops.sign_encode(flat, lengths=lengths)])
    each = clock.time([lambda: [ops.sign_encode(p) for p in parts]], most=10)
    return {"tensors": tensors, "count": count, "one_ms": one["median"], "each_ms": each["median"]}


def variants(device: torch.device, count: int, *, budget_s: float = 0.15) -> list[dict[str, Any]]:
    """Times of the Triton kernels with other tile sizes and warps than the built-in ones; CUDA only."""
    from syncline.codecs.kernels import gpu_blocks, gpu_moments, gpu_saturate, gpu_select, gpu_sign, gpu_ternary

    (x,) = inputs([count], device, most=1)
    error = x.roll(1)
    clock = Clock(device)
    packed, means = gpu_sign.sign_encode(x, None, False)
    pos, neg = means[0].contiguous(), means[1].contiguous()
    limit = torch.full((), 1.0, device=device)
    codes = gpu_ternary.ternary_encode(x, limit, None, None)
    int8, scales = gpu_blocks.quantize_blocks(x, 8, 256, None, False)
    trials: dict[str, Callable[[tuple[int, int]], Any]] = {
        "sign encode": lambda c: gpu_sign.sign_encode(x, None, False, c),
        "sign decode": lambda c: gpu_sign.sign_decode(packed, pos, neg, count, None, c),
        "sign residual": lambda c: gpu_sign.sign_residual(x, error, None, False, c),
        "tbq residual": lambda c: gpu_ternary.ternary_residual(x, error, limit, None, None, c),
        "int8 residual": lambda c: gpu_blocks.quantize_residual(x, error, 8, 256, None, False, c),
        "int4 residual": lambda c: gpu_blocks.quantize_residual(x, error, 4, 64, None, False, c),
        "qsgd encode": lambda c: gpu_blocks.quantize_blocks(x, 4, 512, SEED, True, c),
        "terngrad": lambda c: gpu_ternary.terngrad(x, 2.5, SEED, None, c),
        "tbq encode": lambda c: gpu_ternary.ternary_encode(x, limit, None, None, c),
        "terngrad encode": lambda c: gpu_ternary.ternary_encode(x, limit, SEED, None, c),
        "ternary decode": lambda c: gpu_ternary.ternary_decode(codes, limit, count, None, c),
        "int8 encode": lambda c: gpu_blocks.quantize_blocks(x, 8, 256, None, False, c),
        "int8 decode": lambda c: gpu_blocks.dequantize_blocks(int8, scales, 8, 256, count, c),
        "int4 encode": lambda c: gpu_blocks.quantize_blocks(x, 4, 256, None, False, c),
        "compact": lambda c: gpu_select.compact(x, limit * 2.5, count // 50, c),
        "topk": lambda c: gpu_select.topk(x, count // 100, c),
        "moments": lambda c: gpu_moments.moments(x, c),
        "saturate": lambda c: gpu_saturate.saturate(x, 64480.5, torch.float16, 1.0, c),
    }
    bytes_ = [(256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8)]
    values = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]
    threads = [(512, 1), (1024, 2), (1024, 4), (2048, 4), (4096, 8)]  # 16 or 8 values per thread
    rows = []
    for name, trial in trials.items():
        configs = bytes_ if name.split()[0] in ("sign", "tbq", "terngrad", "ternary") else values
        configs = threads if name in ("compact", "topk") else configs
        times = {c: clock.time([partial(trial, c)], budget_s=budget_s)["median"] for c in configs}
        rows.append({"operator": name, "ms": {f"{a}x{w}": t for (a, w), t in times.items()}})
    return rows
