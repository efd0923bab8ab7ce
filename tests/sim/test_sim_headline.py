"""The measured steps of `facts.md`, VGG19 at 1 Gbit/s: two batch sizes, several launch orders (see `sim_cases.vgg19`).

Fitted to nothing: compute per layer is guessed from multiplications, and only totals come from measurements.
"""

import pytest
from sim_cases import vgg19

from syncline.sim import Scenario, simulate

FIFO = list(range(19))  # 0, 1, 2 are the last layers: fc3, fc2, fc1
FC1_LAST = [0, 1, *FIFO[3:], 2]
ALL_FC_LAST = [*FIFO[3:], 0, 1, 2]


@pytest.mark.parametrize(
    ("compute_ms", "order", "measured_ms"),
    [
        (204, FIFO, 267),
        (204, FC1_LAST, 222),
        (204, ALL_FC_LAST, 239),
        (29.5, FIFO, 217),
        (29.5, ALL_FC_LAST, 209),
    ],
)
def test_within_a_tenth_of_what_was_measured(compute_ms: float, order: list[int], measured_ms: float) -> None:
    predicted = simulate(vgg19(compute_ms / 1e3).ordered(order))
    assert predicted.wire == pytest.approx(0.203, rel=0.02)
    assert predicted.step * 1e3 == pytest.approx(measured_ms, rel=0.1)


def _step(scenario: Scenario, order: list[int]) -> float:
    return simulate(scenario.ordered(order)).step


def test_the_best_order_depends_on_the_balance_of_compute_and_wire() -> None:
    large, small = vgg19(0.204), vgg19(0.0295)
    assert _step(large, FC1_LAST) < _step(large, ALL_FC_LAST) < _step(large, FIFO)
    in_order = [*FIFO[3:], 2, 1, 0]
    assert _step(small, in_order) < _step(small, FC1_LAST) < _step(small, FIFO)


def test_first_in_first_out_leaves_next_to_nothing_to_hide() -> None:
    fifo = vgg19(0.204)
    assert _step(fifo, FIFO) > 0.95 * _step(fifo.with_(rival=True), FIFO)


def test_one_late_bias_spoils_it() -> None:
    """Measured: 222 without, 274 with."""
    apart = vgg19(0.204, bias_apart=True)
    beside = [0, 1, *FIFO[3:], 19, 2]
    assert _step(apart, beside) == pytest.approx(_step(vgg19(0.204), FC1_LAST), rel=0.02)
    assert _step(apart, [0, 1, *FIFO[3:], 2, 19]) == pytest.approx(0.274, rel=0.1)
