"""Codecs on a CUDA device, and exchanges over NCCL: two ranks on one device, told apart as two hosts."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1] / "codecs"))
sys.path.insert(0, str(Path(__file__).parent))
from codec_table import SPECS
from over_gloo import drive, grads

from syncline import codecs, exchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
]
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("spec", SPECS)
def test_cuda_gives_what_the_cpu_gives(spec: str) -> None:
    here = codecs.lockstep(spec, grads, 2, world_size=3)
    there = codecs.lockstep(spec, lambda s, r: [g.cuda() for g in grads(s, r)], 2, world_size=3)
    assert here.wire_bytes == there.wire_bytes
    for rank in range(3):
        for a, b, first in zip(here.outputs[rank], there.outputs[rank], there.outputs[0], strict=True):
            torch.testing.assert_close(a, b.cpu(), **CLOSE)
            assert torch.equal(b, first)


def nccl_rank(rank: int, world: int, folder: str) -> None:
    os.environ.update(NCCL_HOSTID=str(rank), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    for spec in SPECS:
        for name in exchange.legal(spec):
            link = exchange.connect(name)
            outputs, _, sent = drive(link, spec, 2, device="cuda")
            want = exchange.lockstep(spec, grads, 2, exchange=name, world_size=link.position.workers)
            assert sent == want.wire_bytes[rank], (spec, name)
            close = {"rtol": 2e-2, "atol": 2e-2} if "16" in spec else CLOSE
            for got, expected in zip(outputs, want.outputs[rank], strict=True):
                torch.testing.assert_close(
                    got.cpu(), expected, msg=lambda m, s=spec, n=name: f"{s} over {n}: {m}", **close
                )
            same = torch.cat([o.flatten() for o in outputs])
            other = same.clone()
            dist.broadcast(other, 0)
            assert torch.equal(same, other), (spec, name)
    dist.destroy_process_group()


def test_every_legal_pair_over_nccl() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(nccl_rank, args=(2, folder), nprocs=2)
