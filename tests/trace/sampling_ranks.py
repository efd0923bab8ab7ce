"""Rank functions of the sampling tests, in a module so that other processes can import them."""

import time

import pytest
from recording_ranks import Loop

from syncline.trace import recording
from syncline.trace.record import sampling

STEP_S = 0.01
"""Long enough for all ranks to learn the interval before the first step is skipped."""


def by_default(rank, world_size, kind, folder, steps):
    """Each rank by itself would choose a different interval."""
    loop = Loop(rank, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "sampling_interval", lambda **_: 5 + 3 * rank)
        with recording(loop.model, loop.optimizer, path=folder):
            for _ in range(steps):
                time.sleep(STEP_S)
                loop.step()
    loop.close()


def straggling(rank, world_size, kind, folder, steps, every):
    """Rank 1 sleeps in forward."""
    loop = Loop(rank, kind)
    sleep_s = 0.025 if rank == 1 else 0.005
    loop.inner[0].register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    with recording(loop.model, loop.optimizer, path=folder, every=every):
        for _ in range(steps):
            loop.step()
    loop.close()
