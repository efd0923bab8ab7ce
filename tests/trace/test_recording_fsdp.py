"""A recording of a sharded model (FSDP2): its all-gathers belong to the forward pass, not to loading data."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from syncline.trace import recording
from syncline.trace.formats.load import load
from syncline.trace.span import ISSUING


def train_sharded(rank, world, path):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, path=path, every=1) as running:
        for x in running.data([torch.randn(4, 16)] * 5):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_all_gather_of_a_sharded_model_is_in_its_forward_pass(tmp_path):
    run_ranks(train_sharded, 2, str(tmp_path / "trace.json"))
    spans = load(tmp_path / "trace.json").spans
    compared = 0
    for rank in range(2):
        for step in range(1, 5):
            mine = [s for s in spans if (s.rank, s.step) == (rank, step)]
            forward = min(s.start for s in mine if s.lane == "forward")
            collectives = [s.start for s in mine if s.lane == "exchange"]
            assert collectives, "the all-gather is recorded"
            assert forward <= min(collectives)
            issuing = [(s.start, s.end) for s in mine if s.name == ISSUING]
            assert issuing, "FSDP packs, starts and unpacks messages"
            computing = [(s.start, s.end) for s in mine if s.lane in ("forward", "backward")]
            assert not any(a < d and c < b for a, b in issuing for c, d in computing)
            compared += 1
    assert compared == 8
