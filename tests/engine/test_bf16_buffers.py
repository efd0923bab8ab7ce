"""Reused bfloat16 buffers: the same bits as without them, and no new memory."""

import pytest
import torch

from syncline.codecs import Merge
from syncline.codecs.coder import cast
from syncline.engine.launch.bf16_buffers import Bf16Buffers

BF16 = cast(torch.bfloat16)


def _merges(*sizes, mean=True, scratch=True):
    return [Merge(torch.randn(size), BF16, mean=mean, own=False, scratch=scratch) for size in sizes]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("mean", [True, False])
def test_a_message_holds_the_rounded_shares(world, mean):
    torch.manual_seed(0)
    merges = _merges(5, 1000, 3, mean=mean)
    values = torch.cat([merge.tensor for merge in merges])
    sent = Bf16Buffers().write(merges, world).tensor
    assert sent.dtype == torch.bfloat16
    share = 1 / world if mean else 1.0
    expected = (values.double() * share).float().bfloat16()
    # A division by a power of two may come after rounding; else the product is rounded once, from float32.
    assert torch.equal(sent, expected)


def test_the_sum_is_read_into_the_gradients_and_the_buffer_is_reused():
    message = Bf16Buffers()
    merges = _merges(4, 6)
    places = [merge.tensor.data_ptr() for merge in merges]
    sent = message.write(merges, 2).tensor
    outs = message.read(merges, torch.arange(10).bfloat16())
    assert [out.mean.data_ptr() for out in outs] == places
    assert torch.equal(torch.cat([out.mean for out in outs]), torch.arange(10.0))
    assert message.write(_merges(4, 6), 2).tensor.data_ptr() == sent.data_ptr()
    assert message.write(_merges(4, 7), 2).tensor.numel() == 11


def test_tensors_that_a_codec_still_needs_are_not_overwritten():
    (merge,) = _merges(3, scratch=False)
    before = merge.tensor.clone()
    Bf16Buffers().write([merge], 2)
    (out,) = Bf16Buffers.read([merge], torch.ones(3).bfloat16())
    assert torch.equal(out.mean, torch.ones(3))
    assert torch.equal(merge.tensor, before)


def test_messages_of_one_launch_have_their_own_buffers():
    messages = Bf16Buffers()
    first, second = (messages.write(_merges(3), 1, key=key).tensor for key in ((1, 0), (1, 1)))
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize(
    "merge",
    [
        Merge(torch.zeros(3), BF16),
        Merge(torch.zeros(3), cast(torch.float16), own=False),
        Merge(torch.zeros(3, dtype=torch.float64), BF16, own=False),
    ],
)
def test_other_requests_do_not_use_a_buffer(merge):
    assert not Bf16Buffers.can_send(merge)
