"""Direct codecs: error feedback while encoding gives what separate passes give, over every exchange."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from syncline import codecs, exchange
from syncline.codecs import ops
from syncline.codecs.coder import coder
from syncline.codecs.requests import Merge, lower
from syncline.codecs.state import State

FEEDBACK = ["int8", "int4", "onebit", "efsignsgd", "tbq(0.5)", "topk(0.1)", "graddrop(0.1)", "threshold(0.5)"]
FEEDBACK += ["bf16(feedback=true)", "qsgd(feedback=true)", "natural(feedback=true)", "terngrad(feedback=true)"]
FEEDBACK += ["onebit | bf16", "topk(0.1) | int8", "warmup(int8, steps=1)"]
SCALES = ["onebit", "efsignsgd", "terngrad", "tbq"]
SHAPES = [(33, 20), (7,), (0,)]


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(step, rank):
    return [normal(shape, 100 * step + 10 * rank + i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("spec", FEEDBACK)
def test_fused_feedback_equals_feedback_in_separate_passes(spec):
    fused = codecs.build(spec)
    assert fused.direct
    apart = replace(fused, direct=False)
    # Every exchange for two of them; the others where a rank encodes once, and where it encodes a sum again.
    names = exchange.legal(fused)
    for name in names if spec in ("int8", "onebit | bf16") else {"allgather", "sharded"}.intersection(names):
        one, two = (exchange.lockstep(codec, gradients, 2, world_size=3, exchange=name) for codec in (fused, apart))
        for a, b in zip(one.outputs[0], two.outputs[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for mine, other in zip(one.states, two.states, strict=True):
            assert mine.keys() == other.keys()
            for key in mine:
                torch.testing.assert_close(mine[key], other[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["int8", "onebit", "tbq(0.5)", "topk(0.1)", "qsgd", "natural", "bf16"])
def test_the_residual_is_what_the_payload_does_not_say(spec):
    run = codecs.build(spec).run(step=3)
    request = lower(run.start(normal((500,), 1)))
    x, error = normal((500,), 2), normal((500,), 3)
    held = x.clone(), error.clone()
    for residual in (None, error):
        whole = x if residual is None else x + residual
        payload, rest = request.coder.encode_residual(x, residual, seed=9)
        plain = request.coder.encode(whole, seed=9)
        assert all(torch.equal(a, b) for a, b in zip(payload, plain, strict=True))
        sent = request.coder.decode(payload, 500, seed=9)
        torch.testing.assert_close(rest, whole - sent, rtol=0, atol=1e-6)
        total = x.clone()
        mean = request.coder.decode_onto(total, payload, 500, divisor=2, seed=9)
        torch.testing.assert_close(mean, (x + sent) / 2)
        assert mean is total
    assert torch.equal(x, held[0])
    assert torch.equal(error, held[1])


def test_a_driver_that_answers_with_its_own_share_still_leaves_the_right_residual():
    run = codecs.build("int8").run()
    grad, error = normal((300,), 1), normal((300,), 2)
    request = run.start(grad, {"error": error})
    assert isinstance(request, Merge)
    own = request.coder.decode(request.coder.encode(request.whole()), 300)
    result = run.resume(codecs.Out(own, own))
    torch.testing.assert_close(result.state["error"], grad + error - own)


@pytest.mark.parametrize("spec", SCALES)
def test_tensors_that_travel_together_have_their_own_scales(spec):
    """One large and one small tensor with scales of 1 and 1e-4: together they get what they get alone."""

    def sizes(step, rank):
        return [normal((100,), 10 * step + rank), normal((37,), 10 * step + rank + 5) * 1e-4, torch.zeros(0)]

    together = codecs.lockstep(spec, sizes, 3, world_size=2, small=1000)
    apart = codecs.lockstep(spec, sizes, 3, world_size=2)
    if spec == "terngrad":  # other random numbers: compare the scales
        for a, b in zip(together.outputs[0], apart.outputs[0], strict=True):
            if a.numel():
                assert float(a.abs().max()) == pytest.approx(float(b.abs().max()), rel=1.1)
        return
    for a, b in zip(together.outputs[0], apart.outputs[0], strict=True):
        torch.testing.assert_close(a, b)
    assert together.states[0].keys() == apart.states[0].keys()
    for key, residual in together.states[0].items():
        torch.testing.assert_close(residual, apart.states[0][key])


@pytest.mark.parametrize("spec", SCALES)
def test_the_bytes_of_tensors_that_travel_together_are_declared(spec):
    grads = [[normal((100,), r), normal((37,), r + 5)] for r in range(2)]
    codec = codecs.build(spec)
    (batch,) = codecs.batches(codec, ["a", "b"], [(100,), (37,)], small=1000)
    sent = codecs.lockstep(spec, grads, small=1000).wire_bytes[0]
    assert sent == codec.wire_bytes(batch.shape, packed=True, lengths=batch.lengths)
    for name in exchange.legal(codec):
        result = exchange.lockstep(spec, grads, exchange=name, small=1000)
        assert all(torch.equal(a, b) for a, b in zip(result.outputs[0], result.outputs[1], strict=True))


def test_a_coder_of_concatenated_tensors_can_be_cut_anywhere():
    lengths = (5, 0, 17, 3)
    whole = coder(ops.sign_encode, lambda p, count, *, lengths: ops.sign_decode(*p, count, lengths=lengths),
                  lengths=lengths)  # fmt: skip
    x = normal((25,), 1)
    for cuts in ((0, 25), (0, 4, 25), (0, 5, 9, 22, 25), (0, 0, 25)):
        for start, stop in pairwise(cuts):
            part = whole.part(start, stop)
            assert sum(dict(part.options)["lengths"]) == stop - start
            assert part.decode(part.encode(x[start:stop]), stop - start).shape == (stop - start,)
    assert dict(whole.part(4, 23).options)["lengths"] == (1, 17, 1)


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "acpsgd(rank=2)", "powersgd(rank=2) | bf16", "powersgd(rank=1)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_sample_of_a_product_shows_a_broken_value(spec, bad):
    codec = codecs.build(spec)
    for step in (6, 7):
        grad = normal((3, 33, 20), 1)
        grad[1, 17, 5] = bad
        run = codec.run(names=("a", "b", "c"), step=step)
        now = run.start(grad)
        while not isinstance(now, codecs.Result):
            now = run.resume(codecs.Out(now.tensor, now.tensor) if isinstance(now, Merge) else now.tensor)
        assert now.sample is not None
        assert now.sample.numel() < now.output.numel()
        assert not ops.finite(now.sample)


def test_a_state_knows_the_lengths_of_concatenated_tensors():
    codec = codecs.build("onebit")
    one, many = codecs.batches(codec, ["a"], [(5,)]), codecs.batches(codec, ["a", "b"], [(5,), (2, 3)], small=10)
    assert one[0].lengths is None
    assert many[0].lengths == (5, 6)
    assert State().lengths is None
