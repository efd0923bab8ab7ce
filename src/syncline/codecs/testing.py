"""Conformance tests that every codec must pass, also yours: `check("my_module:my_codec")`.

Each law is a function of a codec's spec that runs it in lockstep on a few ranks in this process and raises an
`AssertionError` with a sentence. `check` runs all of them in a few seconds. No process group and no GPU is needed.
"""

import io
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from syncline.codecs.build import build
from syncline.codecs.lockstep import lockstep

SHAPES = [(0,), (1,), (7,), (33, 20), (4, 3, 2), (12, 4, 3, 3), (1, 9), (0, 5), (), (40, 40)]
"""The shapes of the parameters that the laws use."""
LAWS: dict[str, Callable[[str], None]] = {}
"""The laws by name."""


def check(spec: str) -> None:
    """Run a codec, or a chain of codecs, through all laws; the first that it breaks raises an `AssertionError`."""
    for law in LAWS.values():
        law(spec)


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def gradients(step: int, rank: int, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A gradient of each shape for a step and a rank."""
    return [normal(shape, 100 * step + 10 * rank + i).to(dtype) for i, shape in enumerate(SHAPES)]


def _law(function: Callable[[str], None]) -> Callable[[str], None]:
    LAWS[function.__name__] = function
    return function


def _require(holds: object, spec: str, sentence: str) -> None:
    if not holds:
        raise AssertionError(f"codec '{spec}': {sentence}")


def _same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@_law
def shape_and_dtype_are_kept_and_ranks_agree(spec: str) -> None:
    """Every rank gets the same bits, in the gradient's shape and dtype, and they are finite."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        result = lockstep(spec, partial(gradients, dtype=dtype), steps=2, world_size=3)
        for outputs in result.outputs:
            for output, first, shape in zip(outputs, result.outputs[0], SHAPES, strict=True):
                where = f"for a gradient of shape {shape} and {dtype}"
                _require(output.shape == shape, spec, f"the output has shape {tuple(output.shape)} {where}")
                _require(output.dtype == dtype, spec, f"the output is {output.dtype} {where}")
                _require(output.isfinite().all(), spec, f"the output is not finite {where}")
                _require(torch.equal(output, first), spec, f"the ranks get different outputs {where}")


@_law
def nothing_is_lost(spec: str) -> None:
    """With error feedback, gradient + old residual = output + new residual, on one rank."""
    if build(spec).feedback is not True:  # "own": the codec may add more, such as momentum
        return
    states = None
    for step in range(4):
        before: dict[str, Tensor] = dict(states[0]) if states else {}
        grads = gradients(step, 0)
        result = lockstep(spec, [grads], states=states, first_step=step)
        states = result.states
        for i, (grad, output) in enumerate(zip(grads, result.outputs[0], strict=True)):
            whole = grad + before.get(f"p{i}.error", torch.zeros_like(grad))
            close = torch.allclose(whole, output + states[0][f"p{i}.error"], rtol=1e-5, atol=1e-5)
            _require(close, spec, f"gradient + residual is not output + new residual, for shape {tuple(grad.shape)}")


@_law
def declared_bytes_are_sent(spec: str) -> None:
    """`wire_bytes` is what is sent, whatever the values."""
    codec = build(spec)
    for step in (0, 1, 2, 3, 7):
        for i, shape in enumerate(SHAPES):
            sent = lockstep(spec, [[gradients(0, rank)[i]] for rank in range(2)], first_step=step).wire_bytes
            declared = codec.wire_bytes(torch.Size(shape), step=step)
            text = f"{sent[0]} bytes are sent and {declared} declared, for shape {shape} in step {step}"
            _require(sent == [declared] * 2, spec, text)


@_law
def the_same_seed_gives_the_same_bits(spec: str) -> None:
    """Random numbers come from the seed alone."""
    one, two = (lockstep(spec, gradients, steps=3, world_size=2, seed=7) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(one.outputs[0], two.outputs[0], strict=True))
    _require(same and _same_tensors(one.states[1], two.states[1]), spec, "two runs with the same seed differ")


@_law
def state_goes_through_a_checkpoint(spec: str) -> None:
    """Saved and loaded state continues bit for bit."""
    whole = lockstep(spec, gradients, steps=5, world_size=2)
    file = io.BytesIO()
    torch.save(lockstep(spec, gradients, steps=3, world_size=2).states, file)
    file.seek(0)
    rest = lockstep(
        spec, gradients, steps=2, world_size=2, states=torch.load(file, weights_only=True), first_step=3
    )  # fmt: skip
    same = all(torch.equal(a, b) for a, b in zip(whole.outputs[1], rest.outputs[1], strict=True))
    _require(same and _same_tensors(whole.states[1], rest.states[1]), spec, "a resumed run differs from a whole one")


@_law
def layout_in_memory_does_not_matter(spec: str) -> None:
    """Transposed and channels-last gradients give the same bits."""
    grads = [normal((33, 20), 1), normal((6, 8, 3, 3), 2)]
    odd = [grads[0].t().contiguous().t(), grads[1].to(memory_format=torch.channels_last)]
    plain, strided = lockstep(spec, [grads], steps=2), lockstep(spec, [odd], steps=2)
    same = all(torch.equal(a, b) for a, b in zip(plain.outputs[0], strided.outputs[0], strict=True))
    _require(same, spec, "a gradient with another layout in memory gives another output")


@_law
def inputs_and_old_state_are_left_alone(spec: str) -> None:
    """Neither the gradients nor the state that was passed in are changed, so that a step can be dropped."""
    first = lockstep(spec, gradients, steps=2, world_size=2)
    kept = [{key: tensor.clone() for key, tensor in state.items()} for state in first.states]
    lockstep(spec, gradients, world_size=2, states=first.states, first_step=2)
    same = all(_same_tensors(state, copy) for state, copy in zip(first.states, kept, strict=True))
    _require(same, spec, "it changes the state tensors that it was given: make new ones")
    grads = gradients(0, 0)
    held = [g.clone() for g in grads]
    lockstep(spec, [grads, grads], steps=2)
    same = all(torch.equal(a, b) for a, b in zip(grads, held, strict=True))
    _require(same, spec, "it changes the gradient that it was given: make a new tensor")


@_law
def zeros_stay_zero(spec: str) -> None:
    """A gradient of zeros comes back as zeros, and does no harm in later steps."""
    zeros = [torch.zeros(s) for s in SHAPES]
    result = lockstep(spec, [zeros, zeros], steps=3)
    _require(all((o == 0).all() for o in result.outputs[0]), spec, "a gradient of zeros comes back as something else")
    after = lockstep(spec, gradients, steps=3, world_size=2, states=result.states, first_step=3)
    _require(all(o.isfinite().all() for o in after.outputs[0]), spec, "after zeros, the output is not finite")
    _require(any((o != 0).any() for o in after.outputs[0]), spec, "after zeros, nothing is sent any more")


@_law
def huge_gradients_do_not_overflow(spec: str) -> None:
    """Gradients of 1e18 stay finite, and ranks agree."""
    result = lockstep(spec, [[normal(s, 10 * r + i, 1e18) for i, s in enumerate(SHAPES)] for r in range(2)])
    for a, b in zip(result.outputs[1], result.outputs[0], strict=True):
        _require(a.isfinite().all(), spec, f"a gradient of 1e18 overflows, for shape {tuple(a.shape)}")
        _require(torch.equal(a, b), spec, f"the ranks differ for a gradient of 1e18, for shape {tuple(a.shape)}")


def _broken_values_are_seen(spec: str, value: float) -> None:
    """One nan or infinity on one rank shows on all ranks; declare `spread=True` if the codec may not send it."""
    for shape, place in [((33, 20), 417), ((7,), 0), ((1,), 0), ((4, 3, 2), 23)]:
        grads = [[normal(shape, 1)], [normal(shape, 2)]]
        grads[1][0].view(-1)[place] = value
        result = lockstep(spec, grads, first_step=6)
        seen = all(not outputs[0].isfinite().all() for outputs in result.outputs)
        text = f"{value} in one rank's gradient of shape {shape} is not seen on all ranks: declare spread=True"
        _require(seen, spec, text)


for _value in (float("nan"), float("inf"), -float("inf")):
    LAWS[f"broken_values_are_seen[{_value}]"] = partial(_broken_values_are_seen, value=_value)


@_law
def small_tensors_can_travel_together(spec: str) -> None:
    """Small tensors laid end to end keep their shapes and their state."""
    apart = lockstep(spec, gradients, steps=2, world_size=2)
    together = lockstep(spec, gradients, steps=2, world_size=2, small=10_000)
    for a, b in zip(apart.outputs[0], together.outputs[0], strict=True):
        _require(a.shape == b.shape, spec, f"joined with others, a gradient of {tuple(a.shape)} gets another shape")
    shapes = [{key: tensor.shape for key, tensor in run.states[0].items()} for run in (apart, together)]
    _require(shapes[0] == shapes[1], spec, "joined with others, tensors have other state than alone")
