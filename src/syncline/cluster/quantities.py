"""Parse and format bandwidths, times, sizes and fractions as people write them (`1Gbit`, `5ms`, `8GB`, `0.1%`).

>>> parse_bandwidth("1Gbit"), parse_bandwidth("100M"), format_bandwidth(1_500_000_000)
(1000000000, 100000000, '1.5Gbit')
>>> parse_time("5ms"), parse_fraction("0.1%")
(0.005, 0.001)
>>> parse_bytes("8GB"), parse_bytes("500 MB")
(8000000000, 500000000)
"""

import math
import re

from syncline.errors import UsageError

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kKmMgGtT]?)(?:(?i:bits?|bit/s|bits/s)|bps|b/s)?")
_BYTES = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kKmMgGtT]?)(i?)[bB]?")
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us|µs)?")


def parse_bandwidth(text: str | int | float) -> int:
    """Bits per second; a plain number is in bits per second."""
    match = _BANDWIDTH.fullmatch(str(text).strip()) if not isinstance(text, float) else None
    if match:
        bits = round(float(match[1]) * _SCALES[match[2].lower()])
    elif isinstance(text, float) and math.isfinite(text):
        bits = round(text)
    else:
        bits = 0
    if bits <= 0:
        raise UsageError(f"'{text}' is not a bandwidth: write for example 1Gbit, 100Mbit or 500kbit (bits per second)")
    return bits


def format_bandwidth(bits: float) -> str:
    """A bandwidth in the largest fitting unit, with at most four digits."""
    for unit, scale in (("Gbit", 10**9), ("Mbit", 10**6), ("kbit", 10**3)):
        if bits >= scale:
            return f"{float(f'{bits / scale:.4g}'):g}{unit}"
    return f"{bits:g}bit"


def parse_time(text: str | int | float) -> float:
    """Seconds; a plain number is in seconds."""
    match = _TIME.fullmatch(str(text).strip())
    if match is None:
        raise UsageError(f"'{text}' is not a time: write for example 5ms, 250us or 0.1s")
    return float(match[1]) * _SECONDS[match[2] or ""]


def parse_fraction(text: str | int | float) -> float:
    """A fraction between 0 and 1, written as `0.1%` or `0.001`."""
    word = str(text).strip()
    try:
        fraction = float(word[:-1]) / 100 if word.endswith("%") else float(word)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise UsageError(f"'{text}' is not a fraction of packets: write for example 0.1% or 0.001")
    return fraction


def parse_bytes(text: str | int) -> int:
    """Bytes; `GB` is a thousand million, `GiB` is 2**30."""
    match = _BYTES.fullmatch(str(text).strip())
    if match is None or not float(match[1]):
        raise UsageError(f"'{text}' is not a size: write for example 8GB or 500MB")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    scale = 1024.0 if match[3] else 1000.0
    return round(float(match[1]) * scale**power)
