"""A rank killed during a reshape: the others name it, and the run goes on from the checkpoint with its freeze state."""

import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipelines import batch_of, freeze, workload

from ranks import CONTEXT, run_ranks
from syncline.errors import PeerError
from syncline.pipeline import rank_stages
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.run import Pipeline

VIT, SAMPLES = "vit(size=tiny)", 8


def _train(pipe, data, steps):
    losses = []
    for step in steps:
        indices = torch.arange(SAMPLES) + SAMPLES * step
        losses.append(float(pipe.train_batch(batch_of(data, indices[list(pipe.share(SAMPLES))]), total=SAMPLES)))
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
    return losses


def _made(*, stages):
    model, data = workload(VIT)
    return Pipeline(Blocks.of(model), torch.optim.Adam(model.parameters(), lr=0.01), stages=stages), data


def _killed(rank, folder, sender, victim, moment):
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=10))
    pipe, data = _made(stages=4)
    _train(pipe, data, range(2))
    freeze(pipe.blocks, 2)
    move = getattr(rank_stages, moment)

    def dies(*args, **kwargs):
        if rank == victim:
            sender.send(("fired", ""))
            os.kill(os.getpid(), signal.SIGKILL)
        return move(*args, **kwargs)

    setattr(rank_stages, moment, dies)
    try:
        pipe.reshape(stages=2, checkpoint=f"{folder}/saved.pt", extra={"position": 2 * SAMPLES})
    except PeerError as error:
        sender.send(("error", str(error), error.ranks))
        os._exit(3)


def _resumed(rank, world, path, steps):
    pipe, data = _made(stages=2)
    torch.manual_seed(5)
    extra = pipe.load(path)
    frozen = pipe.blocks.frozen()
    losses = _train(pipe, data, steps)
    pipe.close()
    return extra, frozen, losses


def _unbroken(rank, world, steps):
    pipe, data = _made(stages=2)
    first = _train(pipe, data, steps[:2])
    freeze(pipe.blocks, 2)
    out = first + _train(pipe, data, steps[2:])
    pipe.close()
    return out


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(2, "move_state", id="before values move"),
        pytest.param(0, "compare_replicas", id="rank 0, after it"),
    ],
)
def test_a_rank_killed_during_a_reshape_is_named_and_the_run_resumes_from_the_checkpoint(victim, moment):
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(4)]
        ranks = [
            CONTEXT.Process(target=_killed, args=(rank, folder, pipes[rank][1], victim, moment)) for rank in range(4)
        ]
        try:
            for process in ranks:
                process.start()
            told = [receiver.recv() if receiver.poll(40) else None for receiver, _ in pipes]
            for process in ranks:
                process.join(20)
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        assert (told[victim], codes[victim]) == (("fired", ""), -signal.SIGKILL), "the fault happened"
        for rank in set(range(4)) - {victim}:
            assert told[rank] is not None, f"rank {rank} said nothing"
            kind, text, named = told[rank]
            assert kind == "error"
            assert codes[rank] == 3
            assert tuple(named) == (victim,), text
            assert "reshape 4x1 -> 2x2" in text
            assert "saved.pt" in text
        results = run_ranks(_resumed, 2, str(Path(folder) / "saved.pt"), [2, 3])
        expected = run_ranks(_unbroken, 2, [0, 1, 2, 3])[0][2:]
    for extra, frozen, losses in results:
        assert extra == {"position": 2 * SAMPLES}
        assert frozen == 2, "the same blocks are frozen"
        assert all(abs(a - b) < 1e-12 for a, b in zip(losses, expected, strict=True)), (losses, expected)
