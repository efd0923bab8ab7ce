"""State by name, grouping, and another number of ranks."""

import pytest
import torch

from syncline import codecs
from syncline.codecs import flatten, lockstep, reshard, unflatten


def run(world: int, steps: int = 3, **more: object) -> codecs.Lockstep:
    def grads(step: int, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return [torch.randn(24, 20, generator=generator), torch.randn(9, generator=generator)]

    return lockstep("powersgd(rank=2)", grads, steps, world_size=world, names=["a.weight", "a.bias"], **more)  # type: ignore[arg-type]


def test_names_are_flat_and_come_back() -> None:
    state = run(2).states[0]
    assert set(state) == {"a.weight.error", "a.weight.q", "a.bias.error"}
    assert state["a.weight.error"].shape == (24, 20)
    again = flatten(unflatten(state))
    assert all(again[key] is state[key] for key in state)
    with pytest.raises(ValueError, match="parameter"):
        unflatten({"error": torch.zeros(1)})


@pytest.mark.parametrize("new", [1, 2, 5])
def test_reshard_keeps_the_sum_of_residuals(new: int) -> None:
    states = run(3).states
    moved = reshard(states, new)
    assert len(moved) == new
    before, after = (sum(s["a.weight.error"] for s in group) for group in (states, moved))
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(moved[0]["a.weight.q"], states[0]["a.weight.q"])
    kept = reshard(states, new, keep="mean")
    torch.testing.assert_close(sum(s["a.weight.error"] for s in kept) / new, before / 3)
    assert run(new, states=moved, first_step=3).outputs[0][0].isfinite().all()


def test_reshard_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        reshard([], 2)
    with pytest.raises(ValueError, match="different names"):
        reshard([{"a.error": torch.zeros(1)}, {}], 2)
    with pytest.raises(ValueError, match="keep"):
        reshard([{}], 2, keep="all")


def test_another_grouping_goes_on_from_the_same_state() -> None:
    codec = codecs.build("topk(0.5)")
    shapes = [(4, 3), (5,), (2, 2)]
    states = {name: {"error": torch.randn(shape)} for name, shape in zip("abc", shapes, strict=True)}
    (together,) = codecs.batches(codec, "abc", shapes, small=100)
    packed = together.pack_state(states)
    assert packed["error"].shape == (21,)
    back = together.unpack_state(packed)
    assert all(torch.equal(back[n]["error"], states[n]["error"]) for n in "abc")
    apart = codecs.batches(codec, "abc", shapes)
    assert [b.names for b in apart] == [("a",), ("b",), ("c",)]
    assert all(torch.equal(b.pack_state(states)["error"], states[b.names[0]]["error"].view(-1)) for b in apart)


def test_a_newcomer_in_a_group_starts_from_nothing() -> None:
    codec = codecs.build("powersgd(rank=2)")
    (batch,) = codecs.batches(codec, "ab", [(24, 20), (24, 20)])
    run = codec.run(names=batch.names, step=4)
    old = {"a": {"error": torch.randn(24, 20), "q": torch.randn(20, 2)}}
    grads = [torch.randn(24, 20), torch.randn(24, 20)]
    now = run.start(batch.pack(grads), batch.pack_state(old))
    while not isinstance(now, codecs.Result):
        now = run.resume(now.tensor)  # type: ignore[union-attr]
    a, b = batch.unpack(now.output)
    assert a.norm() > 0.1
    assert b.norm() > 0.1


def test_a_lost_direction_is_found_again() -> None:
    low = torch.outer(torch.randn(24), torch.randn(20))
    full = torch.randn(24, 4) @ torch.randn(4, 20)
    states = lockstep("powersgd(rank=4, min_rate=1)", [[low]], steps=3).states
    result = lockstep("powersgd(rank=4, min_rate=1, feedback=false)", [[full]], steps=4, states=states, first_step=3)
    torch.testing.assert_close(result.outputs[0][0], full, rtol=1e-2, atol=1e-2)


def test_matrices_of_one_size_and_several_shapes_share_a_stack_with_their_state() -> None:
    codec = codecs.build("powersgd(rank=2)")
    shapes, generator = {"linear": (64, 27), "conv": (64, 3, 3, 3), "new": (64, 27)}, torch.Generator().manual_seed(0)
    states = {
        name: {"error": torch.randn(shape, generator=generator), "q": torch.randn(27, 2, generator=generator)}
        for name, shape in shapes.items() if name != "new"
    }  # fmt: skip
    states["new"] = {"q": torch.randn(27, 5, generator=generator)}  # of another rank
    (batch,) = codecs.batches(codec, list(shapes), list(shapes.values()))
    packed = batch.pack_state(states)
    assert packed["error"].shape == (3, 64, 27)
    assert packed["q"].shape == (3, 27, 2)
    assert not packed["q"][2].any(), "what does not fit starts anew"
    again = batch.unpack_state(packed)
    for name in ("linear", "conv"):
        for key in ("error", "q"):
            assert torch.equal(again[name][key], states[name][key])
    assert again["new"]["error"].shape == (64, 27)
