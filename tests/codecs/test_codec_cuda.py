"""Codecs on a CUDA device: the same results as on the CPU, without making the host wait."""

import pytest
import torch
from codec_table import SPECS

from syncline import codecs
from syncline.codecs.requests import answer, lower

pytestmark = pytest.mark.gpu
SHAPES = [(64, 300), (7,), (5000,), (40, 9, 3, 3)]


def gradients(step: int, rank: int, device: str = "cuda") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


@pytest.mark.parametrize("spec", SPECS)
def test_cuda_gives_what_the_cpu_gives(spec: str) -> None:
    small = 100_000 if spec in ("onebit", "efsignsgd", "terngrad") else 0
    cuda, cpu = (
        codecs.lockstep(spec, lambda step, rank, d=device: gradients(step, rank, d), 3, world_size=2, small=small)
        for device in ("cuda", "cpu")
    )
    pairs = [*zip(cuda.outputs[0], cpu.outputs[0], strict=True)]
    pairs += [(tensor, cpu.states[1][key]) for key, tensor in cuda.states[1].items() if key.endswith("error")]
    for got, want in pairs:
        scale = float(want.abs().max()) + 1e-6
        # A scale that differs in its last bit moves a value across a limit now and then.
        off = ((got.cpu() - want).abs() > 1e-3 * scale).float().mean()
        assert float(off) <= 0.02, f"{float(off):.1%} of {tuple(want.shape)} differ"
    assert cuda.wire_bytes == cpu.wire_bytes


def one_step(codec: codecs.Codec, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> codecs.Result:
    run = codec.run(step=5)
    now = run.start(grad, state)
    while not isinstance(now, codecs.Result):
        if isinstance(now, codecs.Gather):
            now = run.resume([now.payload])
            continue
        merge = lower(now)
        payload, lost = merge.coder.encode_residual(merge.tensor, merge.residual, seed=merge.seed)
        mean = merge.coder.decode_onto(None, payload, merge.tensor.numel(), seed=merge.seed)
        now = run.resume(answer(now, merge.out(mean, lost)))
    return now


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_does_not_make_the_host_wait(spec: str) -> None:
    codec = codecs.build(spec)
    grad = torch.randn(1, 256, 300, device="cuda") if codec.view == "matrix" else torch.randn(80_000, device="cuda")
    state = one_step(codec, grad, {}).state
    one_step(codec, grad, dict(state))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one_step(codec, grad, dict(state))
    finally:
        torch.cuda.set_sync_debug_mode("default")
