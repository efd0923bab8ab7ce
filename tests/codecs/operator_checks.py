"""Checks of the fused operators on a device against the plain reference: random data, odd sizes, poisoned memory."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import ops
from syncline.codecs.kernels import linalg, pieces, plain, sparse

SIZES = (1, 7, 8, 255, 1000, 4097, 100_003, (1 << 20) + 5, (1 << 22) + 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(device: torch.device, *, sizes: tuple[int, ...] = SIZES) -> list[str]:
    """One line for each difference; empty if all operators agree."""
    wrong: list[str] = []
    for size in sizes:
        for dtype in DTYPES:
            x = (torch.randn(size, device=device) * 3).to(dtype)
            for name, check in _CHECKS.items():
                _poison(device)
                try:
                    check(x)
                except (AssertionError, RuntimeError, ValueError) as error:
                    wrong.append(f"{name}, {size} x {dtype}: {str(error).strip()[:300]}")
    others = {"segments": _segments, "many residuals": _many_residuals, "factors": _factors, "keep": _keep}
    others |= {"orthonormal": _orthonormal, "special values": _special}
    for name, once in others.items():
        try:
            once(device)
        except (AssertionError, RuntimeError, ValueError) as error:
            wrong.append(f"{name}: {str(error).strip()[:300]}")
    return wrong + (_syncs(device) if device.type == "cuda" else [])


def _poison(device: torch.device) -> None:
    """Fill the memory of the next allocations, so that elements that are never written are noticed."""
    held = [
        torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for size in [512] * 16 + [1 << 19] * 8 + [1 << 25]
    ]
    del held


def _same(got: Tensor, want: Tensor, what: str) -> None:
    # The reference ran on the same device; bits must agree, nan included.
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")


def _sign(x: Tensor) -> None:
    packed, pos, neg = ops.sign_encode(x)
    want = plain.pack_bits((x.cpu() >= 0).to(torch.uint8), 1)
    _same(packed.cpu(), want, "bits")
    exact = x.cpu().double()
    for got, side in ((pos, exact[exact >= 0]), (neg, exact[exact < 0])):
        mean = side.mean() if side.numel() else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(got.cpu().double(), mean, rtol=1e-5, atol=1e-6)
    _same(ops.sign_decode(packed, pos, neg, x.numel()), pieces.sign_decode(packed, pos, neg, x.numel(), None), "decode")
    bits, scale = ops.sign_encode_l1(x)
    _same(bits.cpu(), want, "l1 bits")
    torch.testing.assert_close(scale.cpu().double(), exact.abs().mean(), rtol=1e-5, atol=1e-7)


def _ternary(x: Tensor) -> None:
    limit = torch.full((), 1.25, device=x.device)
    for seed in (None, 11):
        scale = limit if seed is None else ops.abs_max(x)
        got = ops.ternary_encode(x, threshold=scale) if seed is None else ops.terngrad_encode(x, scale=scale, seed=seed)
        _same(got, pieces.ternary_encode(x, scale, seed, None), f"codes, seed {seed}")
        decoded = ops.ternary_decode(got, scale, x.numel())
        _same(decoded, pieces.ternary_decode(got, scale, x.numel(), None), "decode")


def _blocks(x: Tensor) -> None:
    n = x.numel()
    combinations = [(bits, seed, norm) for bits in (8, 4, 2, 3) for seed in (None, 5) for norm in ("max", "l2")]
    # Other dtypes differ only in how they are loaded; each combination costs a compilation.
    for bits, seed, norm in combinations if x.dtype == torch.float32 else [(8, None, "max"), (4, 5, "l2")]:
        packed, scales = ops.quantize_blocks(x, bits=bits, block=128, seed=seed, norm=norm)
        want, want_scales = plain.quantize_blocks(x, bits, 128, seed, norm == "l2")
        torch.testing.assert_close(scales, want_scales, rtol=1e-5, atol=0)
        got_codes, codes = (plain.unpack_bits(p, bits, n).int() for p in (packed, want))
        off = (got_codes - codes).abs()
        off = torch.minimum(off, (1 << bits) - off)
        # A norm that differs in its last bit moves a value across the middle of a step now and then.
        assert int(off.max()) <= 1, f"codes differ by {int(off.max())}, bits {bits}"
        assert int((off > 0).sum()) <= max(2, n // 1000), f"{int((off > 0).sum())} codes differ, bits {bits}"
        out = ops.dequantize_blocks(packed, scales, bits=bits, block=128, count=n)
        _same(out, plain.dequantize_blocks(packed, scales, bits, 128, n), f"decode, bits {bits}")


def _residuals(x: Tensor) -> None:
    """Encoders that add a residual and keep what they lose, and decoders that add."""
    n = x.numel()
    limit = torch.full((), 0.8, device=x.device)
    for error in (None, torch.randn(n, device=x.device)):
        got, want = ops.sign_residual(x, error), pieces.sign_residual(x, error, None, False)
        _same(got[0], want[0], "sign bits with a residual")
        torch.testing.assert_close(torch.stack(got[1:3]), want[1][:, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got[3], want[2], rtol=1e-5, atol=1e-5)
        for a, b in zip(
            ops.ternary_residual(x, error, threshold=limit),
            pieces.ternary_residual(x, error, limit, None, None),
            strict=True,
        ):
            _same(a, b, "ternary with a residual")
        packed, scales, rest = ops.quantize_residual(x, error, bits=4, block=128)
        _same(packed, pieces.quantize_residual(x, error, 4, 128, None, False)[0], "steps with a residual")
        whole = pieces.added(x, error)
        _same(rest, whole - ops.dequantize_blocks(packed, scales, bits=4, block=128, count=n), "residual of blocks")
    total = torch.randn(n, device=x.device)
    packed, pos, neg = ops.sign_encode(x)
    codes, natural = ops.ternary_encode(x, threshold=limit), ops.natural_encode(x, seed=3)
    steps, scales = ops.quantize_blocks(x)
    decoders: dict[str, Callable[..., Tensor]] = {
        "sign": partial(ops.sign_decode, packed, pos, neg, n),
        "ternary": partial(ops.ternary_decode, codes, limit, n),
        "blocks": partial(ops.dequantize_blocks, steps, scales, count=n),
        "natural": partial(ops.natural_decode, natural, n),
    }
    for name, decode in decoders.items():
        # torch's division by a number differs in the last bit on CUDA.
        for divisor in (1, 3):
            got, want = decode(onto=total.clone(), divisor=divisor), total.add(decode()).div_(divisor)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9, msg=f"{name} decoded onto a sum")


def _terngrad(x: Tensor) -> None:
    for clip in (0.0, 2.5):
        packed, scale = ops.terngrad(x, clip=clip, seed=7)
        want, want_scale = pieces.terngrad(x, clip, 7, None)
        torch.testing.assert_close(scale, want_scale[0], rtol=1e-5, atol=0)
        _same(packed, pieces.ternary_encode(x, scale, 7, None), "terngrad codes")
        assert int((packed != want).sum()) <= 2 + x.numel() // 1000, "terngrad codes, by the reference's scale"


def _natural(x: Tensor) -> None:
    codes = ops.natural_encode(x, seed=3)
    _same(codes, plain.natural_encode(x, 3), "codes")
    _same(ops.natural_decode(codes, x.numel()), plain.natural_decode(codes), "decode")


def _topks(x: Tensor) -> list[Callable[[Tensor, int], tuple[Tensor, Tensor]]]:
    """The operator, and on CUDA also the kernel that it uses for large tensors only."""
    if x.device.type != "cuda" or x.dtype == torch.float64:
        return [ops.topk]
    from syncline.codecs.kernels import gpu_select

    return [ops.topk, gpu_select.topk]


def _select(x: Tensor) -> None:
    n = x.numel()
    threshold = ops.sampled_threshold(x, ratio=0.02, seed=1)
    for capacity in (1, n // 40 + 1, n):
        got = ops.compact(x, threshold=threshold, capacity=capacity)
        want = sparse.compact(x, threshold, capacity)
        for name, a, b in zip(("values", "indices", "count"), got, want, strict=True):
            _same(a, b, f"compact {name}, capacity {capacity}")
    for k, topk in product({1, n // 100 + 1, n // 3 + 1, n}, _topks(x)):
        values, indices = topk(x, k)
        best = x.abs().float().cpu().sort(descending=True).values[:k]
        _same(values.abs().float().cpu().sort(descending=True).values, best, f"topk values, k {k}")
        assert bool((indices[1:] > indices[:-1]).all()), f"topk order, k {k}"
        _same(x[indices.long()], values, f"topk positions, k {k}")
        dense = ops.densify(values, indices, n)
        assert int((dense != 0).sum()) == int((values != 0).sum()), "densify"


def _misled(x: Tensor) -> None:
    """The k largest values although the sampled threshold is wrong: too low, too high, nan."""
    if x.device.type != "cuda":
        return
    from syncline.codecs.kernels import gpu_select

    honest = gpu_select._first_threshold
    k = x.numel() // 100 + 1
    want = gpu_select.topk(x, k)
    for wrong in (0.0, 1e30, float("nan")):
        off = torch.full((), wrong, device=x.device)
        gpu_select._first_threshold = lambda *_, off=off: off
        try:
            got = gpu_select.topk(x, k)
        finally:
            gpu_select._first_threshold = honest
        for name, a, b in zip(("values", "positions"), got, want, strict=True):
            _same(a, b, f"{name}, threshold {wrong}")


def _reduce(x: Tensor) -> None:
    exact = x.cpu().double()
    want = torch.stack([exact.mean(), exact.std(unbiased=False), exact.abs().max()])
    got = torch.stack(ops.moments(x)).cpu().double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    _same(torch.stack(ops.moments(x)).cpu().double(), got, "moments, twice")
    for seed, samples in ((1, 8192), (2, 100)):
        got = ops.sampled_threshold(x, ratio=0.02, seed=seed, samples=samples)
        _same(got, sparse.sampled_threshold(x, 0.02, seed, samples), f"threshold of {samples} samples")


def _saturate(x: Tensor) -> None:
    x = x.clone()
    x[: x.numel() // 2] *= 1e5
    x[:1] = float("inf")
    x[-1:] = float("nan")
    for dtype in (torch.float16, x.dtype):
        _same(ops.saturate(x, limit=64480.5, dtype=dtype), plain.saturate(x, 64480.5, dtype), f"saturate to {dtype}")


def _pack(x: Tensor) -> None:
    for bits in range(1, 9):
        values = (x.float().abs() * 1000).to(torch.int32).to(torch.uint8) & ((1 << bits) - 1)
        packed = ops.pack_bits(values, bits)
        _same(packed, plain.pack_bits(values, bits), f"pack {bits}")
        _same(ops.unpack_bits(packed, bits, values.numel()), values, f"unpack {bits}")


_CHECKS: dict[str, Callable[[Tensor], None]] = {
    "sign": _sign,
    "ternary": _ternary,
    "blocks": _blocks,
    "natural": _natural,
    "residuals": _residuals,
    "terngrad": _terngrad,
    "select": _select,
    "misled": _misled,
    "reduce": _reduce,
    "saturate": _saturate,
    "pack": _pack,
}


def _segments(device: torch.device) -> None:
    lengths = [3, 0, 5000, 1, 70_001, 8, 12_345]
    x = torch.randn(sum(lengths), device=device)
    packed, pos, neg = ops.sign_encode(x, lengths=lengths)
    want, means = pieces.sign_encode(x, tuple(lengths), False)
    _same(packed, want, "sign bits")
    torch.testing.assert_close(torch.stack([pos, neg]), means, rtol=1e-5, atol=1e-6)
    out = ops.sign_decode(packed, pos, neg, x.numel(), lengths=lengths)
    _same(out, pieces.sign_decode(packed, pos, neg, x.numel(), tuple(lengths)), "sign decode")
    scale = ops.abs_max(x, lengths=lengths)
    codes = ops.terngrad_encode(x, scale=scale, seed=4, lengths=lengths)
    _same(codes, pieces.ternary_encode(x, scale, 4, tuple(lengths)), "terngrad codes")
    out = ops.ternary_decode(codes, scale, x.numel(), lengths=lengths)
    _same(out, pieces.ternary_decode(codes, scale, x.numel(), tuple(lengths)), "terngrad decode")


def _many_residuals(device: torch.device) -> None:
    lengths = [3, 0, 5000, 1, 70_001, 8, 12_345]
    x, error = torch.randn(2, sum(lengths), device=device)
    packed, *means, rest = ops.sign_residual(x, error, lengths=lengths)
    want = pieces.sign_residual(x, error, tuple(lengths), False)
    _same(packed, want[0], "sign bits of many tensors with a residual")
    torch.testing.assert_close(torch.stack(means), want[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rest, want[2], rtol=1e-5, atol=1e-5)
    codes, scale = ops.terngrad(x, clip=2.5, seed=4, lengths=lengths)
    torch.testing.assert_close(scale, pieces.terngrad(x, 2.5, 4, tuple(lengths))[1], rtol=1e-5, atol=0)
    _same(codes, pieces.ternary_encode(x, scale, 4, tuple(lengths)), "terngrad of many tensors")
    codes, scale, rest = ops.ternary_relative(x, error, tau=1.5, lengths=lengths)
    magnitudes = torch.stack(
        [piece.abs().mean() if len(piece) else x.new_zeros(()) for piece in (x + error).split(lengths)]
    )
    torch.testing.assert_close(scale, 1.5 * magnitudes, rtol=1e-5, atol=0)
    want = pieces.ternary_residual(x, error, scale, None, tuple(lengths))
    _same(codes, want[0], "tbq of many tensors")
    _same(rest, want[1], "tbq's residual of many tensors")


def _factors(device: torch.device) -> None:
    for k, n, r in ((5, 512, 4), (3, 2048, 8), (2, 3000, 32), (1, 100_000, 5)):
        m, fresh = torch.randn(2, k, n, r, device=device)
        m[0, :, 0] = 0
        torch.testing.assert_close(ops.unit_columns(m, fresh), linalg.unit_columns(m, fresh))
        got, want = ops.orthonormal(m).double(), linalg.orthonormal(m).double()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        m[0, 1, 2] = float("inf")
        assert bool(ops.orthonormal(m)[0].isnan().all()), "orthonormal hides an infinity"


def _keep(device: torch.device) -> None:
    new, old = torch.randn(2, 100_003, device=device)
    for good, before, want in ((True, old, new), (False, old, old), (False, None, torch.zeros_like(new))):
        _same(ops.keep_if(torch.tensor(good, device=device), new.clone(), before), want, f"keep_if {good}")


def _orthonormal(device: torch.device) -> None:
    for n, r, rank in ((1000, 64, 64), (1000, 64, 5), (25_088, 64, 64), (10, 16, 10), (50, 4, 0), (2000, 4, 2)):
        m = torch.randn(n, max(1, rank), device=device) @ torch.randn(max(1, rank), r, device=device) * (rank > 0)
        q = ops.orthonormal(m).double()
        norms = torch.linalg.vector_norm(q, dim=0)
        gram = q.mT @ q
        assert float((gram - torch.diag((norms > 0.5).double())).abs().max()) < 1e-5, f"{n} x {r} of rank {rank}"
        lost = torch.linalg.vector_norm(m.double() - q @ (q.mT @ m.double()))
        assert float(lost) <= 1e-4 * max(1e-9, float(torch.linalg.vector_norm(m.double()))), f"{n} x {r} of rank {rank}"
        assert torch.equal(ops.orthonormal(m), ops.orthonormal(m)), "not the same twice"


def _special(device: torch.device) -> None:
    x = torch.randn(5000, device=device)
    x[1234], x[4000] = float("nan"), float("inf")
    packed, scales = ops.quantize_blocks(x)
    out = ops.dequantize_blocks(packed, scales, count=5000)
    broken = torch.zeros(20, dtype=torch.bool, device=device)
    broken[[1234 // 256, 4000 // 256]] = True
    _same(out.isnan(), broken.repeat_interleave(256)[:5000], "blocks with nan or inf")
    codes = ops.ternary_encode(x, threshold=1.0)
    assert bool(ops.ternary_decode(codes, 1.0, 5000)[1234].isnan()), "ternary loses nan"
    assert not bool(torch.isfinite(torch.stack(ops.sign_encode(x)[1:])).all()), "sign loses nan"
    assert bool(ops.natural_decode(ops.natural_encode(x, seed=1), 5000)[[1234, 4000]].isnan().all()), (
        "natural loses nan"
    )
    _same(ops.uniform(1000, seed=9, device=device).cpu(), ops.uniform(1000, seed=9), "random numbers")


def _syncs(device: torch.device) -> list[str]:
    """Operators that make the host wait for the device."""
    x = torch.randn(1 << 21, device=device)
    lengths = [1 << 20, 1 << 20]
    m = torch.randn(4096, 32, device=device)
    values, indices = ops.topk(x, 1000)
    calls: dict[str, Callable[[], Any]] = {
        "sign": lambda: ops.sign_decode(*ops.sign_encode(x), x.numel()),
        "segments": lambda: ops.sign_encode(x, lengths=lengths),
        "ternary": lambda: ops.ternary_decode(ops.ternary_encode(x, threshold=0.5), 0.5, x.numel()),
        "terngrad": lambda: ops.terngrad_encode(x, scale=ops.abs_max(x), seed=1),
        "moments": lambda: ops.moments(x),
        "saturate": lambda: ops.saturate(x, limit=2.0, dtype=torch.float16),
        "blocks": lambda: ops.dequantize_blocks(*ops.quantize_blocks(x), count=x.numel()),
        "odd blocks": lambda: ops.dequantize_blocks(*ops.quantize_blocks(x, bits=3), bits=3, count=x.numel()),
        "qsgd": lambda: ops.qsgd_encode(x, seed=1),
        "natural": lambda: ops.natural_decode(ops.natural_encode(x, seed=1), x.numel()),
        **{f"topk {i}": partial(topk, x, 1000) for i, topk in enumerate(_topks(x))},
        "small topk": lambda: ops.topk(x[:1000], 10),
        "sampled threshold": lambda: ops.sampled_threshold(x, ratio=0.01, seed=1),
        "compact": lambda: ops.compact(x, threshold=2.0, capacity=1000),
        "scatter_add": lambda: ops.scatter_add(x.clone(), indices, values),
        "densify": lambda: ops.densify(values, indices, x.numel()),
        "orthonormal": lambda: ops.orthonormal(m),
        "narrow orthonormal": lambda: ops.orthonormal(m[:, :4].contiguous()),
        "unit columns": lambda: ops.unit_columns(m[None], m[None]),
        "residuals": lambda: (
            ops.sign_residual(x, x),
            ops.quantize_residual(x, x),
            ops.ternary_residual(x, x, threshold=m[0, 0]),
        ),
        "terngrad with its scale": lambda: ops.terngrad(x, clip=2.5, seed=1),
        "keep": lambda: ops.keep_if(x[0] < 9, x, x),
        "uniform": lambda: ops.uniform(1000, seed=1, device=device),
    }
    wrong = []
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            wrong.append(f"{name} waits for the device: {str(error)[:200]}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return wrong
