"""The memory that a session needs, estimated before it starts; a rank that was killed for lack of memory."""

import os
import signal

import pytest

from syncline.cluster import memory as machine
from syncline.cluster.ranks import Place, run_ranks
from syncline.errors import RankFailure, UsageError
from syncline.train.config import Config, Train
from syncline.train.session import memory
from syncline.train.session.runs import list_runs

RESNET = {"train.model": "resnet50", "cluster.nproc": 4, "train.device": "cpu"}


def refused(values: dict[str, object], *, together: bool = False) -> str:
    config = Config().override(values)
    with pytest.raises(UsageError) as error:
        memory.check_memory(config, list_runs(config, world_size=4), together=together)
    return str(error.value)


def test_the_footprint_of_a_model_is_counted_without_its_memory():
    found = memory.measure_footprint(Train(model="resnet50"))
    assert found.parameters == 4 * 25_557_032
    assert found.state == found.parameters, "momentum"
    assert 60e6 < found.per_sample < 110e6, "published: about 88 MB of activations for an image of 224 x 224"
    adam = memory.measure_footprint(Train(model="mlp(hidden=512)", optimizer="adam(lr=0.1)"))
    assert 2 * adam.parameters <= adam.state <= 2 * adam.parameters + 1000


def test_a_session_that_does_not_fit_is_refused_with_one_that_does():
    text = refused(RESNET | {"cluster.memory": "8GB"})
    assert text.startswith("'resnet50' on 4 ranks with a batch of 256 needs about 3")
    assert "and 8 GB are allowed: use --batch 32 (about " in text
    config = Config().override(RESNET | {"cluster.memory": "8GB", "train.batch": 32})
    memory.check_memory(config, list_runs(config, world_size=4))
    assert "use --model 'vgg11' (about" in refused(RESNET | {"cluster.memory": "2.5GB"})
    assert "use a smaller model, a smaller batch or fewer ranks" in refused(RESNET | {"cluster.memory": "100MB"})


def test_contestants_that_are_alive_together_are_added_up():
    many = {"train.model": "vgg19", "train.batch": 8, "cluster.nproc": 2, "train.device": "cpu"}
    strategies = ["local", "ddp", "ddp(bucket_mb=5)", "syncline", "syncline(auto)"]
    values = many | {"compare.strategies": strategies}
    text = refused(values | {"cluster.memory": "20GB"}, together=True)
    assert "on 20 ranks" in text
    assert "use fewer contestants, --strategies 'local,ddp" in text
    text = refused(values | {"cluster.memory": "8GB"}, together=True)
    assert "use --model 'vgg11'" in text


def _killed(place, payload, report):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kills", "short", "text"),
    [
        ([0, 1], False, "ended by SIGKILL, out of memory: use a smaller batch, fewer ranks or a smaller model"),
        ([1, 1], True, "ended by SIGKILL, probably out of memory: this machine has too little for its processes"),
        ([1, 1], False, "ended by SIGKILL"),
    ],
)
def test_a_rank_that_was_killed_for_memory_says_so(kills, short, text, tmp_path, monkeypatch):
    counted = iter(kills)
    monkeypatch.setattr(machine, "oom_kills", lambda: next(counted))
    monkeypatch.setattr(machine, "is_short", lambda: short)
    with pytest.raises(RankFailure) as failure:
        run_ranks(_killed, [Place(rank=0, world_size=1)], None, logs=tmp_path)
    assert failure.value.summary == text
