"""One suite for every registered codec and some chains, driven in lockstep: a new codec is tested by being there."""

import io

import pytest
import torch
from codec_table import SPECS, momentum_of
from torch import Tensor

from syncline import codecs
from syncline.codecs import lockstep

SHAPES = [(0,), (1,), (7,), (33, 20), (4, 3, 2), (12, 4, 3, 3), (1, 9), (0, 5), (), (40, 40)]
every = pytest.mark.parametrize("spec", SPECS)
FEEDBACK = [spec for spec in SPECS if codecs.build(spec).feedback]


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def gradients(step: int, rank: int) -> list[Tensor]:
    return [normal(shape, 100 * step + 10 * rank + i) for i, shape in enumerate(SHAPES)]


@every
def test_shape_and_dtype_are_kept_and_ranks_agree_to_the_bit(spec: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        result = lockstep(spec, lambda s, r, d=dtype: [g.to(d) for g in gradients(s, r)], steps=2, world_size=3)
        for rank in range(3):
            for output, first, shape in zip(result.outputs[rank], result.outputs[0], SHAPES, strict=True):
                assert output.shape == shape
                assert output.dtype == dtype
                assert output.isfinite().all()
                assert torch.equal(output, first)


@pytest.mark.parametrize("spec", FEEDBACK)
def test_gradient_plus_old_residual_is_output_plus_new_residual(spec: str) -> None:
    states = None
    for step in range(4):
        before = dict(states[0]) if states else {}
        grads = gradients(step, 0)
        result = lockstep(spec, [grads], states=states, first_step=step)
        states = result.states
        for i, (grad, output) in enumerate(zip(grads, result.outputs[0], strict=True)):
            # Where dgc is still warming up without its momentum there is none to add.
            left = grad + before.get(f"p{i}.error", torch.zeros_like(grad)) + momentum_of(spec, before, f"p{i}")
            torch.testing.assert_close(left, output + states[0][f"p{i}.error"], rtol=1e-5, atol=1e-5)


# tbq sends steps of a fixed size, and dgc's momentum is in the sum.
@pytest.mark.parametrize("spec", [spec for spec in FEEDBACK if "dgc" not in spec and "tbq" not in spec])
def test_feedback_delivers_everything_in_the_end(spec: str) -> None:
    grad = [normal((33, 20), 5), normal((33, 20), 6)]
    total = torch.zeros(33, 20)
    states, steps = None, 400 if spec == "randomk" else 150
    for step in range(steps):
        result = lockstep(spec, [[g] for g in grad], states=states, first_step=step)
        states, total = result.states, total + result.outputs[0][0]
    mean = (grad[0] + grad[1]) / 2
    assert (total / steps - mean).norm() < 0.35 * mean.norm()


@every
def test_declared_bytes_are_actual_bytes(spec: str) -> None:
    codec = codecs.build(spec)
    for step in (0, 1, 2, 3, 7):
        for i, grad in enumerate(gradients(0, 0)):
            grads = [[g[i]] for g in (gradients(0, 0), gradients(0, 1))]
            actual = lockstep(spec, grads, first_step=step).wire_bytes
            assert actual == [codec.wire_bytes(grad.shape, step=step)] * 2, (grad.shape, step)


@every
def test_the_same_seed_gives_the_same_bits_and_another_one_may_not(spec: str) -> None:
    one, two = (lockstep(spec, gradients, steps=3, world_size=2, seed=7) for _ in range(2))
    for a, b in zip(one.outputs[0], two.outputs[0], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(one.states[1][k], two.states[1][k]) for k in one.states[1])


@every
def test_state_goes_through_a_checkpoint(spec: str) -> None:
    whole = lockstep(spec, gradients, steps=5, world_size=2)
    half = lockstep(spec, gradients, steps=3, world_size=2)
    file = io.BytesIO()
    torch.save(half.states, file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    rest = lockstep(spec, gradients, steps=2, world_size=2, states=states, first_step=3)
    for a, b in zip(whole.outputs[1], rest.outputs[1], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(whole.states[1][k], rest.states[1][k]) for k in whole.states[1])


@every
def test_layout_in_memory_does_not_matter(spec: str) -> None:
    grads = [normal((33, 20), 1), normal((6, 8, 3, 3), 2)]
    odd = [grads[0].t().contiguous().t(), grads[1].to(memory_format=torch.channels_last)]
    plain, strided = lockstep(spec, [grads], steps=2), lockstep(spec, [odd], steps=2)
    for a, b in zip(plain.outputs[0], strided.outputs[0], strict=True):
        assert torch.equal(a, b)


@every
def test_inputs_are_left_alone_and_a_dropped_step_leaves_no_trace(spec: str) -> None:
    grads, first = gradients(0, 0), lockstep(spec, gradients, steps=2, world_size=2)
    kept = [{k: t.clone() for k, t in state.items()} for state in first.states]
    dropped = lockstep(spec, gradients, world_size=2, states=first.states, first_step=2)
    del dropped
    for state, copy in zip(first.states, kept, strict=True):
        assert all(torch.equal(state[k], copy[k]) for k in copy)
    held = [g.clone() for g in grads]
    lockstep(spec, [grads, grads], steps=2)
    assert all(torch.equal(a, b) for a, b in zip(grads, held, strict=True))


@every
def test_zeros_stay_zero_and_do_no_harm_later(spec: str) -> None:
    zeros = [torch.zeros(s) for s in SHAPES]
    result = lockstep(spec, [zeros, zeros], steps=3)
    assert all((output == 0).all() for output in result.outputs[0])
    after = lockstep(spec, gradients, steps=3, world_size=2, states=result.states, first_step=3)
    assert all(output.isfinite().all() for output in after.outputs[0])
    assert any((output != 0).any() for output in after.outputs[0])


@every
def test_huge_gradients_do_not_overflow(spec: str) -> None:
    huge = [[normal(s, 10 * r + i, 1e18) for i, s in enumerate(SHAPES)] for r in range(2)]
    result = lockstep(spec, huge)
    for rank in range(2):
        for a, b in zip(result.outputs[rank], result.outputs[0], strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_on_one_rank_is_seen_on_all(spec: str, bad: float) -> None:
    for shape, place in [((33, 20), 417), ((7,), 0), ((1,), 0), ((4, 3, 2), 23)]:
        grads = [[normal(shape, 1)], [normal(shape, 2)]]
        grads[1][0].view(-1)[place] = bad
        result = lockstep(spec, grads, first_step=6)
        for rank in range(2):
            assert not result.outputs[rank][0].isfinite().all(), (shape, rank)


@every
def test_small_tensors_can_travel_together(spec: str) -> None:
    codec = codecs.build(spec)
    apart = lockstep(spec, gradients, steps=2, world_size=2)
    together = lockstep(spec, gradients, steps=2, world_size=2, small=10_000)
    for a, b, shape in zip(apart.outputs[0], together.outputs[0], SHAPES, strict=True):
        assert a.shape == b.shape
        if codec.view == "matrix" and len(shape) > 1 and "int8" not in spec:
            torch.testing.assert_close(a, b)
    assert apart.states[0].keys() == together.states[0].keys()
    shapes = {k: t.shape for k, t in apart.states[0].items()}
    assert shapes == {k: t.shape for k, t in together.states[0].items()}


def test_stacked_matrices_give_what_each_alone_gives() -> None:
    for spec in ("powersgd(rank=2)", "acpsgd(rank=2)"):
        grads = [[normal((24, 20), 10 * r + i) for i in range(3)] for r in range(2)]
        stacked = lockstep(spec, grads, steps=3)
        for i in range(3):
            alone = lockstep(spec, [[g[i]] for g in grads], steps=3, names=[f"p{i}"])
            torch.testing.assert_close(alone.outputs[0][0], stacked.outputs[0][i], rtol=1e-4, atol=1e-5)
