"""Counts and magnitudes as people write them: `1 step`, `4 steps`, `25 MB`, `60.3 Tbit/s`."""

_PREFIXES = ("", "k", "M", "G", "T", "P")
_NEXT = 999.5  # three digits would round it up to 1000 of a unit


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "rank"), plural(4, "rank"), plural(2, "match"), plural(12_000, "entry")
    ('1 rank', '4 ranks', '2 matches', '12,000 entries')
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'sh', 'ch')) else 's'}"


def scaled(value: float, unit: str) -> str:
    """A number with a unit such as `B` or `bit/s`, in thousands of it and with three digits.

    >>> scaled(25_000_000, "B"), scaled(6.03e13, "bit/s"), scaled(999_700, "B"), scaled(0, "B")
    ('25 MB', '60.3 Tbit/s', '1 MB', '0 B')
    """
    power = 0
    while abs(value) >= _NEXT and power < len(_PREFIXES) - 1:
        value /= 1000
        power += 1
    number = f"{value:.3g}" if abs(value) < _NEXT else f"{value:,.0f}"
    return f"{number} {_PREFIXES[power]}{unit}"
