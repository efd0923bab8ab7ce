"""Models that a recording was not told about: a GAN's second one, the wrapper of a DDP's inner module, none at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline.trace import load, recording


class Gan:
    def __init__(self):
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)
        self.of_generator = torch.optim.Adam(self.generator.parameters())
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def train(self, steps):
        for number in range(steps):
            self.of_critic.zero_grad()
            self.critic(self.generator(torch.ones(2, 4)).detach()).sum().backward()
            self.of_critic.step()
            if number % 2:
                self.of_generator.zero_grad()
                self.critic(self.generator(torch.ones(2, 4))).sum().backward()
                self.of_generator.step()


def forwards(source, step):
    return sum(s.lane == "forward" and s.name == "forward" and s.step == step for s in source.spans)


@pytest.mark.parametrize("told", ["both", "critic", "generator", "none"])
def test_both_models_of_a_gan_are_recorded(tmp_path, told):
    gan = Gan()
    models = {"both": [gan.generator, gan.critic], "critic": gan.critic, "generator": gan.generator, "none": None}[told]
    optimizer = None if told == "none" else gan.of_critic
    with recording(models, optimizer, path=tmp_path / "t.json", every=1):
        gan.train(6)
    source = load(tmp_path / "t.json")
    assert source.notes == ()
    # A step lasts from one update of the critic to the next, with the generator's update in every second one.
    counts = [forwards(source, step) for step in range(5)]
    assert counts in ([2, 2, 4, 2, 4], [2, 4, 2, 4, 2], [4, 2, 4, 2, 4])
    assert sorted({s.name for s in source.spans if s.lane == "update"}) == ["before step", "update"]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_wrapper_of_an_inner_module_is_found_with_its_buckets(tmp_path, one_rank):
    inner = nn.Linear(8, 8)
    model, optimizer = DistributedDataParallel(inner), torch.optim.SGD(inner.parameters(), lr=0.1)
    with recording(inner, optimizer, path=tmp_path / "t.json"):
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    source = load(tmp_path / "t.json")
    assert source.metadata["strategy"] == "ddp"
    for step in range(3):
        assert forwards(source, step) == 1
        assert [s.unit for s in source.spans if s.lane == "exchange" and s.step == step] == ["bucket 0"]


def test_a_model_that_is_never_called_as_a_module_is_noted(tmp_path):
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with recording(path=tmp_path / "t.json"):
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()
    (note,) = load(tmp_path / "t.json").notes
    assert note == "rank 0: the forward passes of the model that SGD updates were not found: name it with model="


def test_a_search_for_models_does_not_compile_again(tmp_path):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, path=tmp_path / "t.json"):
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(compiled) == 1
    assert [forwards(load(tmp_path / "t.json"), step) for step in range(3)] == [1, 1, 1]
