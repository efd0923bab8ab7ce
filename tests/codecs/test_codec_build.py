"""Specs, chains, warm-up, sizes: what is refused, and with which words."""

import subprocess
import sys

import pytest
import torch

from syncline import codecs
from syncline.codecs import build, lockstep
from syncline.errors import UsageError


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topkk", "did you mean 'topk'"),
        ("topk(2)", "ratio is 2"),
        ("topk(0.1, ratio=0.2)", "given twice"),
        ("topk(0.1, 0.2)", "topk takes (ratio=0.01)"),
        ("powersgd(rank=0)", "rank is 0"),
        ("qsgd(bits=9)", "bits is 9"),
        ("int8(block=0)", "block is 0"),
        ("dgc(rate=3)", "dgc takes (ratio=0.01, momentum=0.9, clip=0.0, optimizer_momentum=0.0)"),
        ("topk(feedback=3)", "use true or false"),
        ("dgc(feedback=false)", "needs its error feedback"),
        ("warmup", "needs a codec"),
        ("warmup(nonsense)", "unknown codec 'nonsense'"),
        ("warmup(onebit, steps=5, ramp=true)", "ramp needs a codec with a ratio"),
        (
            "onebit | int8",
            "onebit sends scales, which int8 cannot encode; after onebit you can chain bf16, fp16",
        ),
        ("topk | onebit", "after topk you can chain bf16, fp16, int4, int8"),
        ("natural | bf16", "natural sends no floats"),
        ("bf16 | int8", "after bf16 you can chain nothing"),
        ("topk | bf16 | int8", "bf16 sends no floats"),
    ],
)
def test_what_cannot_be_is_refused_with_the_choices(spec: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        build(spec)
    assert words in str(error.value)


def test_options_by_place_and_by_name() -> None:
    assert build("topk(0.5)").options == build("topk(ratio=0.5)").options == {"ratio": 0.5}
    assert build("threshold(0.1, 0.2)").options == {"tau": 0.1, "capacity": 0.2}
    assert build("topk(0.1, feedback=false)").feedback is False
    assert build("bf16(feedback=true)").feedback is True


def test_available_and_describe() -> None:
    names = "none fp16 bf16 int8 int4 onebit efsignsgd tbq terngrad qsgd natural topk randomk threshold dgc graddrop"
    assert {*names.split(), "powersgd", "acpsgd", "warmup"} <= set(codecs.available())
    facts = build("powersgd(rank=2) | int8").describe()
    assert facts["requests"] == ["merge", "merge"]
    assert facts["feedback"] is True
    assert facts["spec"] == "powersgd(rank=2) | int8"
    for name in codecs.available():
        doc = codecs.CODECS.get(name).function.__doc__
        assert all(word in doc for word in ("Formula:", "Use it:", "Costs:")), name
        assert "Paper:" in doc or name == "none"


def test_wire_bytes_are_known_without_data() -> None:
    huge = (4096, 25088)
    assert build("none").wire_bytes(huge) == 4 * 4096 * 25088
    assert build("none").wire_bytes(huge, torch.bfloat16) == 2 * 4096 * 25088
    assert build("powersgd(rank=64)").wire_bytes(huge) == 4 * 64 * (4096 + 25088)
    assert build("acpsgd(rank=64)").wire_bytes(huge) == 2 * 64 * (4096 + 25088)
    assert build("acpsgd(rank=64) | bf16").wire_bytes(huge) == 64 * (4096 + 25088)
    assert build("onebit").wire_bytes((1000,)) == 125 + 8
    assert build("topk(0.01)").wire_bytes((100_000,)) == 1000 * 8
    assert build("topk(0.01) | int8").wire_bytes((100_000,)) == 1000 * 5 + 4 * 4


def test_warmup_is_dense_first_and_then_not() -> None:
    grad = [[torch.randn(100)], [torch.randn(100)]]
    dense = (grad[0][0] + grad[1][0]) / 2
    first = lockstep("warmup(topk(0.05), steps=2)", grad, steps=2)
    torch.testing.assert_close(first.outputs[0][0], dense)
    assert not first.states[0]["p0.error"].any()
    third = lockstep("warmup(topk(0.05), steps=2)", grad, first_step=2)
    assert (third.outputs[0][0] != 0).sum() <= 10


def test_warmup_ramps_sparsity_as_dgc_does() -> None:
    codec = build("warmup(dgc(0.002), steps=8, ramp=true)")
    slots = [codec.wire_bytes((4096,), step=step) / 8 / 1.25 for step in (0, 1, 2, 4, 6, 8)]
    assert slots == pytest.approx([1024, 1024, 256, 64, 16, 0.002 * 4096], abs=1)


@pytest.mark.parametrize("spec", ["graddrop(0.05)", "dgc(0.05)", "threshold(tau=0, capacity=0.05)", "topk(0.05)"])
def test_zeros_do_not_crowd_out_the_rest(spec: str) -> None:
    grad = torch.zeros(1000)
    grad[990:] = torch.arange(1.0, 11.0)
    assert torch.equal(lockstep(spec, [[grad]]).outputs[0][0], grad)


def test_a_chains_error_goes_into_the_feedback() -> None:
    grad = [torch.randn(400)]
    plain, chained = lockstep("topk(0.1)", [grad]), lockstep("topk(0.1) | int4", [grad])
    lost = chained.states[0]["p0.error"] - plain.states[0]["p0.error"]
    assert lost.abs().max() > 1e-4
    torch.testing.assert_close(chained.outputs[0][0] + chained.states[0]["p0.error"], grad[0])


def test_a_codec_that_breaks_the_protocol_is_named() -> None:
    with pytest.raises(ValueError, match="float gradient"):
        lockstep("topk", [[torch.ones(3, dtype=torch.int64)]])
    with pytest.raises(ValueError, match="world_size"):
        lockstep("topk", lambda step, rank: [torch.ones(3)])


def test_a_packages_codec_comes_in_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs.CODECS, "_items", dict(codecs.CODECS._items))
    monkeypatch.setattr(codecs.CODECS, "_searched", False)

    class Point:
        name = "halves"

        def load(self) -> object:
            @codecs.codec("halves")
            def halves(grad: torch.Tensor, state: codecs.State) -> codecs.Steps:
                """Half of the mean."""
                mean = yield codecs.Mean(grad / 2)
                return codecs.Out(mean, grad)

            return halves

    monkeypatch.setattr("syncline.registry.entry_points", lambda group: [Point()] if group == "syncline.codec" else [])
    assert "halves" in codecs.available()
    assert torch.equal(lockstep("halves", [[torch.ones(3)]]).outputs[0][0], torch.full((3,), 0.5))


def test_codecs_import_no_distributed_code() -> None:
    script = "import sys, torch; before = set(sys.modules); import syncline.codecs; "
    script += (
        "print([m for m in set(sys.modules) - before if m.startswith(('torch.distributed', 'syncline.exchange'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
