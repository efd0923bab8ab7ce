"""The activation cache on a GPU: entries in its memory, shared by two processes, and in pinned host memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from syncline.pipeline.cache import ActivationCache, shared_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SAMPLES = 32


def _layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda() for _ in range(6)]


@torch.no_grad()
def _plain(layers, count, x):
    for layer in layers[:count]:
        x = layer(x)
    return x


def _epochs(cache, layers, inputs, parts, boundaries):
    for boundary in boundaries:
        cache.move(boundary)
        for ids in parts:
            assert torch.equal(cache(ids, inputs[ids.cuda()]), _plain(layers, boundary, inputs[ids.cuda()]))


@pytest.mark.parametrize("gpu", [0, 20 * 64 * 4, 1_000_000])
def test_hits_are_bit_equal_in_gpu_memory_in_host_memory_and_in_both(gpu):
    layers, inputs = _layers(), torch.randn(SAMPLES, 64, device="cuda")
    cache = ActivationCache(layers, samples=SAMPLES, ram=1_000_000, gpu=gpu, must_pay=False, check=0.5)
    _epochs(cache, layers, inputs, torch.randperm(SAMPLES).split(8), (2, 2, 4, 4))
    assert (cache.stats.misses, cache.stats.continued, cache.stats.hits) == (SAMPLES, SAMPLES, 2 * SAMPLES)
    assert cache.stats.gpu_bytes == min(gpu // 256, SAMPLES) * 256
    assert cache.stats.wrong == cache.stats.damaged == 0
    cache.close()


def _share(rank, world):
    layers = _layers()
    inputs = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(1)).cuda()
    cache = shared_cache(layers, samples=SAMPLES, ram=1_000_000, gpu=1_000_000, must_pay=False, check=0.5)
    for epoch in range(3):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(8)
        _epochs(cache, layers, inputs, order[rank::world], (3,))
        dist.barrier()
    hits = torch.tensor([cache.stats.hits])
    dist.all_reduce(hits)
    dist.barrier()
    cache.close()
    return int(hits), cache.stats.wrong, cache.why_off


def test_processes_on_one_gpu_share_its_memory():
    for hits, wrong, _ in run_ranks(_share, 2):
        assert hits == 2 * SAMPLES
        assert wrong == 0
