"""Damaged payloads: `ValueError`, or values of the right shape; never a crash or a read out of range."""

import pytest
import torch
from codec_table import SPECS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline import codecs
from syncline.codecs import Coder, Gather, Result
from syncline.codecs.kernels.adjacent import adjacent
from syncline.codecs.requests import lower
from syncline.codecs.wire import layout_of, nbytes, pack, unpack

COUNT = 203


def first_request(spec: str) -> codecs.Request:
    codec = codecs.build(spec)
    (batch,) = codecs.batches(codec, ["p"], [(29, 7)])
    grad = torch.randn(29, 7, generator=torch.Generator().manual_seed(1))
    request = codec.run(step=3).start(batch.pack([grad]))
    assert not isinstance(request, Result)
    return request


def buffer_and_reader(spec: str) -> tuple[Tensor, Coder | None, int]:
    request = first_request(spec)
    if isinstance(request, Gather):
        return pack(request.payload), None, COUNT
    merge = lower(request)
    return pack(merge.coder.encode(merge.tensor)), merge.coder, merge.tensor.numel()


# Gathered payloads have no coder to be read by; they are damaged below.
MERGED = [spec for spec in SPECS if buffer_and_reader(spec)[1] is not None]


@pytest.mark.parametrize("spec", MERGED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_damage(spec: str, data: st.DataObject) -> None:
    buffer, coder, count = buffer_and_reader(spec)
    assert coder is not None
    layout = coder.layout(count)
    assert buffer.numel() == nbytes(layout)
    size = data.draw(st.integers(0, 2 * buffer.numel()).filter(lambda n: n != buffer.numel()), label="size")
    with pytest.raises(ValueError, match="bytes"):
        unpack(torch.zeros(size, dtype=torch.uint8), layout)
    broken = buffer.clone()
    for _ in range(data.draw(st.integers(1, 8), label="hits")):
        broken[data.draw(st.integers(0, buffer.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        values = coder.decode(unpack(broken, layout), count)
    except ValueError:
        return
    assert values.shape == (count,)


@pytest.mark.parametrize("spec", ["topk(0.1)", "graddrop(0.1)", "threshold(tau=0.5)", "topk(0.1) | int8"])
@pytest.mark.parametrize("index", [-1, COUNT, 2**31 - 1, -(2**31)])
def test_an_index_outside_is_refused(spec: str, index: int) -> None:
    buffer, coder, count = buffer_and_reader(spec)
    assert coder is not None
    payload = unpack(buffer.clone(), coder.layout(count))
    next(part for part in payload if part.dtype == torch.int32)[0] = index
    with pytest.raises(ValueError, match="outside"):
        coder.decode(payload, count)


@pytest.mark.parametrize("spec", ["dgc(0.1)", "dgc(0.1) | bf16"])
def test_gathered_payloads_are_checked_too(spec: str) -> None:
    run = codecs.build(spec).run(step=3, world=2)
    request = run.start(torch.randn(COUNT))
    assert isinstance(request, Gather)
    bad = tuple(part.clone() for part in request.payload)
    next(part for part in bad if part.dtype == torch.int32)[0] = COUNT
    with pytest.raises(ValueError, match="outside"):
        run.resume([request.payload, bad])


@pytest.mark.parametrize("spec", MERGED)
def test_a_payload_of_another_kind_is_refused(spec: str) -> None:
    _, coder, count = buffer_and_reader(spec)
    assert coder is not None
    with pytest.raises(ValueError, match="not a payload"):
        coder.decode((torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(3)), count)


def test_wire_form_is_one_buffer_without_padding() -> None:
    payload = (torch.arange(3, dtype=torch.uint8), torch.randn(2, 2), torch.tensor(7, dtype=torch.int32))
    buffer = pack(payload)
    assert buffer.numel() == 3 + 16 + 4
    for a, b in zip(payload, unpack(buffer, layout_of(payload)), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="uint8"):
        unpack(buffer.float(), layout_of(payload))


def test_tensors_that_lie_one_after_the_other_are_sent_without_a_copy() -> None:
    parts = adjacent(torch.device("cpu"), ((8,), torch.uint8), ((2, 3), torch.float32), ((1,), torch.float64))
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    buffer = pack(parts)
    assert buffer.data_ptr() == parts[0].data_ptr()
    assert buffer.numel() == 8 + 24 + 8
    assert all(torch.equal(a, b) for a, b in zip(unpack(buffer, layout_of(parts)), parts, strict=True))
    assert pack(parts[:2]).numel() == 32
    apart = pack((parts[0], parts[2]))
    assert apart.data_ptr() != parts[0].data_ptr()
    assert all(
        torch.equal(a, b) for a, b in zip(unpack(apart, layout_of((parts[0], parts[2]))), parts[::2], strict=True)
    )
    odd = adjacent(torch.device("cpu"), ((3,), torch.uint8), ((2,), torch.float32))
    assert [part.shape for part in odd] == [(3,), (2,)]
    assert pack(odd).numel() == 11
