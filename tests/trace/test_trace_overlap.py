"""The overlap of exchanges and compute."""

import doctest
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.trace import LANES, Span, overlap
from syncline.trace.span import COMPUTE_LANES

PIECES = st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 40), st.integers(0, 20)), max_size=12)


@given(PIECES)
def test_overlap_equals_a_nanosecond_by_nanosecond_reference(pieces):
    spans = [Span(0, lane, lane, "", 0, start, start + length) for lane, start, length in pieces]

    def covered(lanes):
        return {t for s in spans if s.lane in lanes for t in range(s.start, s.end)}

    sent = covered({"exchange"})
    unknown = not sent or not any(s.lane in COMPUTE_LANES for s in spans)
    assert overlap(spans) == (None if unknown else pytest.approx(len(sent & covered(COMPUTE_LANES)) / len(sent)))


def test_compression_behind_compute():
    spans = [Span(0, "backward", "", "", 0, 0, 10), Span(0, "encode", "", "", 0, 4, 12)]
    assert overlap(spans, of="encode") == 0.75


@pytest.mark.parametrize("name", ["analysis.overlap", "formats.collective_names"])
def test_examples(name):
    assert doctest.testmod(sys.modules[f"syncline.trace.{name}"]).failed == 0
