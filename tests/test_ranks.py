import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks


def _sum(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def _fail(rank, world_size):
    if rank == 1:
        raise ValueError("rank one fails")
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_run_a_real_process_group(world_size):
    assert run_ranks(_sum, world_size) == [sum(range(world_size))] * world_size


def test_error_of_one_rank_is_raised_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"rank one fails|Connection closed"):
        run_ranks(_fail, 2)
