"""Every registered codec, and some chains, pass the laws of `syncline.codecs.testing`; a new codec is in by itself."""

import pytest
import torch
from codec_table import SPECS, momentum_of
from torch import Tensor

from syncline import codecs
from syncline.codecs import CODECS, Merge, Out, codec, coder, lockstep
from syncline.codecs.testing import LAWS, check, gradients, normal

FEEDBACK = [spec for spec in SPECS if codecs.build(spec).feedback]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, spec: str) -> None:
    LAWS[law](spec)


# What dgc takes back for the optimizer is in its output, and is tested with an optimizer.
OWN = [spec for spec in FEEDBACK if codecs.build(spec).feedback == "own" and "optimizer_momentum" not in spec]


@pytest.mark.parametrize("spec", OWN)
def test_nothing_is_lost_where_a_codec_adds_its_own_momentum(spec: str) -> None:
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


# dgc's momentum is in the sum.
@pytest.mark.parametrize("spec", [spec for spec in FEEDBACK if "dgc" not in spec])
def test_feedback_delivers_everything_in_the_end(spec: str) -> None:
    grad = [normal((33, 20), 5), normal((33, 20), 6)]
    total = torch.zeros(33, 20)
    states, steps = None, 150
    for step in range(steps):
        result = lockstep(spec, [[g] for g in grad], states=states, first_step=step)
        states, total = result.states, total + result.outputs[0][0]
    mean = (grad[0] + grad[1]) / 2
    assert (total / steps - mean).norm() < 0.35 * mean.norm()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if codecs.build(spec).view == "matrix" and "int8" not in spec])
def test_matrices_are_coded_alone_when_small_tensors_travel_together(spec: str) -> None:
    apart = lockstep(spec, gradients, steps=2, world_size=2)
    together = lockstep(spec, gradients, steps=2, world_size=2, small=10_000)
    for a, b in zip(apart.outputs[0], together.outputs[0], strict=True):
        if a.dim() > 1:
            torch.testing.assert_close(a, b)


def test_stacked_matrices_give_what_each_alone_gives() -> None:
    for spec in ("powersgd(rank=2)", "acpsgd(rank=2)"):
        grads = [[normal((24, 20), 10 * r + i) for i in range(3)] for r in range(2)]
        stacked = lockstep(spec, grads, steps=3)
        for i in range(3):
            alone = lockstep(spec, [[g[i]] for g in grads], steps=3, names=[f"p{i}"])
            torch.testing.assert_close(alone.outputs[0][0], stacked.outputs[0][i], rtol=1e-4, atol=1e-5)


def broken_codecs() -> dict[str, tuple[str, str]]:
    """Codecs that break one law each: name to (the law, a part of its sentence)."""

    @codec("changes-gradient")
    def changes_gradient(grad: Tensor, state: codecs.State) -> codecs.Steps:
        return (yield Merge(grad.mul_(1.5), codecs.DENSE))

    @codec("unseeded")
    def unseeded(grad: Tensor, state: codecs.State) -> codecs.Steps:
        out = yield Merge(grad, codecs.DENSE)
        return Out(out.mean * torch.rand(()), out.own)

    @codec("hides-nan")
    def hides_nan(grad: Tensor, state: codecs.State) -> codecs.Steps:
        return (yield Merge(grad.nan_to_num(0.0, 0.0, 0.0), codecs.DENSE))

    @codec("by-value")
    def by_value(grad: Tensor, state: codecs.State) -> codecs.Steps:
        sent = coder(lambda x: (x[x > 0],), lambda payload, count: payload[0].new_zeros(count))
        return (yield Merge(grad, sent))

    @codec("remembers-in-place", feedback="own")
    def remembers_in_place(grad: Tensor, state: codecs.State) -> codecs.Steps:
        kept = state.get("sum", torch.zeros_like(grad))
        kept += 1
        out = yield Merge(state.compensate(grad), codecs.DENSE)
        return Out(out.mean, out.own, {"sum": kept})

    return {
        "changes-gradient": ("inputs_and_old_state_are_left_alone", "changes the gradient"),
        "unseeded": ("the_same_seed_gives_the_same_bits", "same seed"),
        "hides-nan": ("broken_values_are_seen[nan]", "spread=True"),
        "by-value": ("declared_bytes_are_sent", ""),
        "remembers-in-place": ("inputs_and_old_state_are_left_alone", "state tensors"),
    }


def test_a_broken_codec_breaks_its_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CODECS, "_items", dict(CODECS._items))
    for spec, (law, sentence) in broken_codecs().items():
        with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
            LAWS[law](spec)
        assert sentence in str(caught.value), spec
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            check(spec)
