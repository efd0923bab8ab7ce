"""Statistics agree with numpy, and the median's interval covers."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import stats

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(SAMPLES, st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], q: float) -> None:
    assert stats.quantile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-6)


@given(SAMPLES)
def test_summary_is_numpys(values: list[float]) -> None:
    found = stats.summary(values)
    assert found["median"] == pytest.approx(np.median(values), abs=1e-6)
    assert found["mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert found["p95"] == pytest.approx(np.percentile(values, 95), abs=1e-6)
    assert found["std"] == pytest.approx(np.std(values, ddof=1) if len(values) > 1 else 0.0, abs=1e-5)
    assert (found["q1"], found["q3"]) == pytest.approx(tuple(np.quantile(values, [0.25, 0.75])), abs=1e-6)
    assert found["n"] == len(values)


def test_an_empty_sample_has_no_figures() -> None:
    assert stats.summary([])["median"] is None
    for figure in (stats.median, stats.mean, stats.p95, stats.median_interval):
        with pytest.raises(ValueError, match="at least one"):
            figure([])


@pytest.mark.parametrize(("n", "low", "high"), [(5, 1, 5), (6, 1, 6), (10, 2, 9), (39, 13, 27), (100, 40, 61)])
def test_interval_of_a_median_has_the_tabulated_ranks(n: int, low: int, high: int) -> None:
    assert stats.median_interval([float(i) for i in range(1, n + 1)]) == (low, high)


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(3)
    hits = 0
    for _ in range(600):
        low, high = stats.median_interval([draw.lognormvariate(0, 1) for _ in range(39)])
        hits += low <= 1.0 <= high
    assert hits / 600 > 0.93


def test_interval_of_a_hundred_thousand_steps_is_narrow() -> None:
    low, high = stats.median_interval([float(i) for i in range(100_000)])
    assert 0 < high - low < 1000
