"""Damaged and hostile traces: a usage error or a result that the analysis takes, and never long."""

import gzip
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_files import GLOO, HOROVOD

from syncline.errors import UsageError
from syncline.trace import Limits, Span, load, overlap, partition, split_waits
from syncline.trace.export import chrome_trace

ODD = [b"1e999", b"NaN", b"-1", b"1" + b"0" * 400, b'"x"', b"null", b"[]", b"{}", b"[[]]", b"true", b"9e15", b""]
NUMBER = re.compile(rb"-?\d+(\.\d+)?")


def _small_kineto():
    """The fixture with one event in six: small enough to try often, with events of every sort."""
    text = gzip.decompress(GLOO[0].read_bytes()).decode()
    head, _, rest = text.partition('"traceEvents": [')
    events = re.split(r"(?<=\n  }),", rest)
    kept = [e for i, e in enumerate(events[:-1]) if i % 6 == 0 or "Step#" in e or "gloo" in e or "Optimizer" in e]
    return (head + '"traceEvents": [' + ",".join(kept) + "]}").encode()


def _ours():
    spans = [Span(i % 2, lane, lane, "u", i, i * 100, i * 100 + 90) for i, lane in enumerate(["step", "exchange"] * 5)]
    return str(chrome_trace(spans)).replace("'", '"').encode()


SAMPLES = {"torch.profiler": _small_kineto(), "horovod": HOROVOD.read_bytes(), "syncline": _ours()}


def check(path, data):
    """Load it, and analyse what came of it."""
    path.write_bytes(data)
    begin = time.process_time()
    ranks, message = {}, ""
    try:
        ranks = load(path, limits=Limits(bytes=5_000_000)).spans
    except UsageError as error:
        message = str(error)
    assert "\n" not in message
    for spans in ranks.values():
        lengths = {s.step: s.end - s.start for s in spans if s.lane == "step"}
        assert {step: sum(phases.values()) for step, phases in partition(spans).items()} == lengths
        assert overlap(spans) is None or 0 <= overlap(spans) <= 1
    split_waits([span for spans in ranks.values() for span in spans])
    assert time.process_time() - begin < 1


@st.composite
def damaged(draw, kind):
    data = SAMPLES[kind]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["cut", "byte", "drop", "repeat", "number", "number"]))
        if how == "cut":
            data = data[:at]
        elif how == "byte":
            data = data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + 1 :]
        elif how == "number":
            found = NUMBER.search(data, at)
            if found:
                data = data[: found.start()] + draw(st.sampled_from(ODD)) + data[found.end() :]
        else:
            length = draw(st.integers(1, 2000))
            piece = b"" if how == "drop" else data[at : at + length] * 2
            data = data[:at] + piece + data[at + length :]
    return data


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_samples_are_sound(tmp_path, kind):
    (tmp_path / "t.json").write_bytes(SAMPLES[kind])
    assert load(tmp_path / "t.json").kind == kind


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_damaged_trace_never_crashes(tmp_path_factory, kind, data):
    check(tmp_path_factory.getbasetemp() / "fuzz.json", data.draw(damaged(kind)))


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_gzip_never_crashes(tmp_path_factory, at, byte, cut):
    packed = bytearray(PACKED)
    at %= len(packed)
    if cut:
        del packed[at:]
    else:
        packed[at] = byte
    check(tmp_path_factory.getbasetemp() / "fuzz.json.gz", bytes(packed))


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet='[]{}",:0123456789eE.-tfnul \\"', max_size=200), st.sampled_from(["", "[", '{"traceEvents": ['])
)
def test_text_of_json_characters_never_crashes(tmp_path_factory, text, start):
    check(tmp_path_factory.getbasetemp() / "fuzz.json", (start + text).encode())


PACKED = gzip.compress(SAMPLES["torch.profiler"])
