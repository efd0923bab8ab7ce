"""Parsing of bandwidths, times and fractions, and the errors."""

import pytest

from syncline.cluster.quantities import format_bandwidth, parse_bandwidth, parse_fraction, parse_time
from syncline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1Gbit", 10**9),
        ("1gbps", 10**9),
        ("1G", 10**9),
        ("100M", 10**8),
        ("100Mbit/s", 10**8),
        ("2.5 Gbit", 2_500_000_000),
        ("500kbit", 500_000),
        ("64000", 64_000),
        (" 10mbit ", 10**7),
        (10**9, 10**9),
        (1e9, 10**9),
    ],
)
def test_parse_bandwidth(text: str | float, bits: int) -> None:
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize(
    "text", ["", "fast", "1GB", "10MBps", "100MB/s", "-1Gbit", "0", "1Gbit/h", "nan", float("inf")]
)
def test_bandwidth_is_refused_with_examples(text: str | float) -> None:
    with pytest.raises(UsageError, match=r"write for example 1Gbit"):
        parse_bandwidth(text)


@pytest.mark.parametrize("bits", [1, 999, 1000, 1_500_000, 10**8, 10**9, 2_500_000_000, 34 * 10**9])
def test_bandwidth_survives_writing_and_reading(bits: int) -> None:
    assert parse_bandwidth(format_bandwidth(bits)) == bits


def test_bandwidth_is_written_short() -> None:
    assert format_bandwidth(956_412_345.6) == "956.4Mbit"


@pytest.mark.parametrize(
    ("text", "seconds"), [("5ms", 0.005), ("250us", 0.00025), ("0.1s", 0.1), ("2", 2.0), (0.5, 0.5)]
)
def test_parse_time(text: str | float, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5min", "-1ms", "ms", "soon"])
def test_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="write for example 5ms"):
        parse_time(text)


def test_parse_fraction() -> None:
    assert parse_fraction("0.1%") == pytest.approx(0.001)
    assert parse_fraction(0.02) == 0.02
    for text in ("100%", "-1%", "some", "1.5", "nan"):
        with pytest.raises(UsageError, match=r"0\.1%"):
            parse_fraction(text)
