"""Messages in bfloat16 that stay: the bits of the plain way, in memory that was there before."""

import pytest
import torch

from syncline.codecs import Merge
from syncline.codecs.coder import cast
from syncline.engine.launch.bf16_buffers import Rounded

BF16 = cast(torch.bfloat16)


def _merges(*sizes, mean=True, scratch=True):
    return [Merge(torch.randn(size), BF16, mean=mean, own=False, scratch=scratch) for size in sizes]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("mean", [True, False])
def test_a_message_holds_the_rounded_shares(world, mean):
    torch.manual_seed(0)
    merges = _merges(5, 1000, 3, mean=mean)
    values = torch.cat([merge.tensor for merge in merges])
    sent = Rounded().write(merges, world).tensor
    assert sent.dtype == torch.bfloat16
    share = 1 / world if mean else 1.0
    expected = (values.double() * share).float().bfloat16()
    # By powers of two rounding and sharing may change places; else the product is rounded once, from float32.
    assert torch.equal(sent, expected)


def test_the_sum_is_read_to_where_the_gradients_were_and_the_message_is_used_again():
    message = Rounded()
    merges = _merges(4, 6)
    places = [merge.tensor.data_ptr() for merge in merges]
    sent = message.write(merges, 2).tensor
    outs = message.read(merges, torch.arange(10).bfloat16())
    assert [out.mean.data_ptr() for out in outs] == places
    assert torch.equal(torch.cat([out.mean for out in outs]), torch.arange(10.0))
    assert message.write(_merges(4, 6), 2).tensor.data_ptr() == sent.data_ptr()
    assert message.write(_merges(4, 7), 2).tensor.numel() == 11


def test_what_a_codec_may_still_need_is_not_overwritten():
    (merge,) = _merges(3, scratch=False)
    before = merge.tensor.clone()
    Rounded().write([merge], 2)
    (out,) = Rounded.read([merge], torch.ones(3).bfloat16())
    assert torch.equal(out.mean, torch.ones(3))
    assert torch.equal(merge.tensor, before)


def test_messages_of_one_launch_are_apart():
    messages = Rounded()
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
def test_what_is_needed_afterwards_or_written_otherwise_is_left_alone(merge):
    assert not Rounded.takes(merge)
