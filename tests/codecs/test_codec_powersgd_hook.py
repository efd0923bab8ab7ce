"""powersgd against torch's own PowerSGD hook, in a DDP run on two Gloo ranks with the same gradients."""

import numpy as np
import torch
from torch import Tensor, nn

from ranks import run_ranks
from syncline.codecs import lockstep

ROWS, COLUMNS, RANK, PLAIN, STEPS = 24, 20, 2, 2, 6


def gradient(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 * step + rank))


class Given(nn.Module):
    """A weight whose gradient is whatever is passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def torch_hook(rank: int, world: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Gradient, warm-start factor and residual after each compressed step."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    # Where there is a CUDA device the hook synchronises with it, and fails if the gradient is not on it.
    torch.cuda.is_available = lambda: False
    model = nn.parallel.DistributedDataParallel(Given())
    state = hooks.PowerSGDState(
        process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=PLAIN, min_compression_rate=1
    )
    model.register_comm_hook(state, hooks.powerSGD_hook)
    seen = []
    for step in range(STEPS):
        model.zero_grad()
        model(gradient(step, rank)).backward()
        if step >= PLAIN:
            grad = model.module.weight.grad
            q, error = state.q_memory_dict[0], state.error_dict[0]
            seen.append((grad.numpy().copy(), q.view(COLUMNS, RANK).numpy().copy(), error.numpy().copy()))
    return seen


def test_same_as_torchs_hook() -> None:
    ranks = run_ranks(torch_hook, 2)
    # From its first compressed step on: that step's factor and residual are where ours starts.
    states = [
        {"p0.q": torch.from_numpy(r[0][1]), "p0.error": torch.from_numpy(r[0][2]).view(ROWS, COLUMNS)} for r in ranks
    ]
    for step in range(PLAIN + 1, STEPS):
        result = lockstep(
            f"powersgd(rank={RANK}, min_rate=1)", lambda s, r: [gradient(s, r)], world_size=2, states=states,
            first_step=step,
        )  # fmt: skip
        states = result.states
        for rank in range(2):
            grad, _, error = ranks[rank][step - PLAIN]
            np.testing.assert_allclose(result.outputs[rank][0].numpy(), grad, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(states[rank]["p0.error"].view(-1).numpy(), error, rtol=1e-3, atol=1e-4)
