"""The algorithms once more, in NumPy, from the papers' formulas and without a line of ours.

Deterministic quantisers and sparsifiers are functions of one vector; `run` puts error feedback around them. Random
ones give, for each value, the two it may become and the probability of the upper one.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Compressor = Callable[[Array], Array]


def run(compress: Compressor, grads: list[list[Array]]) -> tuple[Array, list[Array]]:
    """`grads[step][rank]`; the mean of the last step and every rank's residual."""
    errors = [np.zeros_like(g) for g in grads[0]]
    mean = np.zeros_like(errors[0])
    for step in grads:
        corrected = [g + e for g, e in zip(step, errors, strict=True)]
        sent = [compress(c) for c in corrected]
        errors = [c - s for c, s in zip(corrected, sent, strict=True)]
        mean = np.mean(sent, axis=0, dtype=np.float64).astype(np.float32)
    return mean, errors


def blockwise(x: Array, *, bits: int, block: int) -> Array:
    """Absmax quantisation: s = max|x| / (2^(b-1) - 1) a block, q = round(x / s)."""
    out = np.zeros_like(x)
    levels = 2 ** (bits - 1) - 1
    for i in range(0, x.size, block):
        piece = x[i : i + block].astype(np.float64)
        scale = np.abs(piece).max() / levels
        if scale > 0:
            out[i : i + block] = np.round(piece / scale) * scale
    return out


def onebit(x: Array) -> Array:
    """Seide et al. 2014: each side becomes its mean."""
    up = x >= 0
    out = np.empty_like(x)
    out[up] = x[up].mean(dtype=np.float64) if up.any() else 0
    out[~up] = x[~up].mean(dtype=np.float64) if (~up).any() else 0
    return out


def efsign(x: Array) -> Array:
    """Karimireddy et al. 2019: (||x||_1 / d) sign(x)."""
    return np.where(x >= 0, 1, -1).astype(np.float32) * np.float32(np.abs(x).sum(dtype=np.float64) / x.size)


def tbq(x: Array, *, tau: float) -> Array:
    """Strom 2015: +t above t, -t below -t; here t is tau times the mean magnitude."""
    t = np.float32(tau * np.abs(x).mean(dtype=np.float64))
    return (t * ((x > t).astype(np.float32) - (x < -t))).astype(np.float32)


def largest(x: Array, *, k: int) -> Array:
    """Keep the k largest magnitudes."""
    keep = np.argsort(-np.abs(x), kind="stable")[:k]
    out = np.zeros_like(x)
    out[keep] = x[keep]
    return out


def hard_threshold(x: Array, *, tau: float, fits: int) -> Array:
    """Keep magnitudes of tau and more, the largest `fits` of them."""
    limit = max(tau, np.sort(np.abs(x))[-fits])
    return np.where(np.abs(x) >= limit, x, np.float32(0))


def dgc(grads: list[list[Array]], *, k: int, momentum: float) -> tuple[Array, list[Array], list[Array]]:
    """Lin et al. 2018, algorithm 4: u = mu u + g, v += u, send and clear the k largest of v in u and v."""
    u = [np.zeros_like(g) for g in grads[0]]
    v = [np.zeros_like(g) for g in grads[0]]
    mean = np.zeros_like(u[0])
    for step in grads:
        sent = []
        for rank, g in enumerate(step):
            u[rank] = np.float32(momentum) * u[rank] + g
            v[rank] = v[rank] + u[rank]
            part = largest(v[rank], k=k)
            keep = part == 0
            u[rank], v[rank] = u[rank] * keep, v[rank] * keep
            sent.append(part)
        mean = np.mean(sent, axis=0, dtype=np.float64).astype(np.float32)
    return mean, v, u


def powersgd(steps: Iterable[list[Array]], q: Array) -> tuple[Array, list[Array]]:
    """Vogels et al. 2019, algorithm 1, with e = delta - decompressed."""
    errors: list[Array] = []
    out = np.zeros(0, np.float32)
    for grads in steps:
        errors = errors or [np.zeros_like(g) for g in grads]
        m = [g + e for g, e in zip(grads, errors, strict=True)]
        p, _ = np.linalg.qr(np.mean([x @ q for x in m], axis=0))
        q = np.mean([x.T @ p for x in m], axis=0)
        out = p @ q.T
        errors = [x - out for x in m]
    return out, errors


def acpsgd(steps: Iterable[list[Array]], q: Array) -> tuple[Array, list[Array]]:
    """Zhang et al. 2023: P = M Q in even steps, Q = M^T P in odd ones, errors local."""
    errors: list[Array] = []
    p = out = np.zeros(0, np.float32)
    for number, grads in enumerate(steps):
        errors = errors or [np.zeros_like(g) for g in grads]
        m = [g + e for g, e in zip(grads, errors, strict=True)]
        if number % 2 == 0:
            q, _ = np.linalg.qr(q)
            local = [x @ q for x in m]
            p = np.mean(local, axis=0)
            out, errors = p @ q.T, [x - f @ q.T for x, f in zip(m, local, strict=True)]
        else:
            p, _ = np.linalg.qr(p)
            local = [x.T @ p for x in m]
            q = np.mean(local, axis=0)
            out, errors = p @ q.T, [x - p @ f.T for x, f in zip(m, local, strict=True)]
    return out, errors


def terngrad(x: Array, *, clip: float) -> tuple[Array, Array, Array]:
    """Wen et al. 2017: s sign(g) b, P(b = 1) = |g| / s, after clipping at c sigma."""
    limit = clip * x.std(dtype=np.float64)
    g = np.clip(x.astype(np.float64), -limit, limit)
    scale = np.abs(g).max()
    return np.where(g < 0, -scale, 0.0), np.where(g < 0, 0.0, scale), np.where(g < 0, 1 + g / scale, g / scale)


def qsgd(x: Array, *, levels: int, block: int) -> tuple[Array, Array, Array]:
    """Alistarh et al. 2017: ||v|| sgn(v) xi, xi on the two levels around s |v| / ||v||."""
    low, high, chance = (np.zeros(x.size) for _ in range(3))
    for i in range(0, x.size, block):
        part = slice(i, i + block)
        norm = np.linalg.norm(x[part].astype(np.float64))
        steps = x[part] / norm * levels
        low[part], high[part] = np.floor(steps) * norm / levels, (np.floor(steps) + 1) * norm / levels
        chance[part] = steps - np.floor(steps)
    return low, high, chance


def natural(x: Array) -> tuple[Array, Array, Array]:
    """Horvath et al. 2019: the powers of two around |x|, up with probability |x| / 2^a - 1."""
    base = 2.0 ** np.floor(np.log2(np.abs(x.astype(np.float64))))
    up = np.abs(x) / base - 1
    low, high = np.where(x > 0, base, -2 * base), np.where(x > 0, 2 * base, -base)
    return low, high, np.where(x > 0, up, 1 - up)
