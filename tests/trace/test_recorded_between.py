"""Recorded loops that do more than train: loading, logging, checkpoints and validation are told apart."""

import io
import logging
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from syncline.trace import analyze, load, recording

pytestmark = pytest.mark.alone
SLOW_S, STEPS = 0.02, 24


class Samples(Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        time.sleep(SLOW_S)
        return torch.ones(4, 8)


class Network(nn.Linear):
    def forward(self, x):
        time.sleep(0.004)
        return super().forward(x)


class SlowHandler(logging.Handler):
    def emit(self, record):
        time.sleep(SLOW_S)


class SlowFile(io.BytesIO):
    """A file system that takes its time."""

    def write(self, data):
        time.sleep(SLOW_S / 2)
        return super().write(data)


def record(path, batches, *, after=lambda step, model: None):
    model = Network(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(model, optimizer, path=path):
        for step, x in enumerate(batches):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after(step, model)
    return analyze(path)


def slowly(batches):
    for batch in batches:
        time.sleep(SLOW_S)
        yield batch


@pytest.fixture
def batches():
    return [torch.ones(4, 8)] * STEPS


def test_a_data_loader_of_torch_is_timed_by_itself(tmp_path):
    told = record(tmp_path, DataLoader(Samples(), batch_size=None))
    assert told.verdict.kind == "input-bound"
    assert 1000 * SLOW_S < told.verdict.recoverable_ms == pytest.approx(told.breakdown_ms["data"])


def test_a_generator_that_was_not_timed_is_not_called_a_data_loader(tmp_path, batches):
    told = record(tmp_path, slowly(batches))
    assert told.verdict.kind == "between-steps"
    assert "ms in code that is not recorded, which may be a data loader that was not timed" in told.verdict.sentence
    assert told.breakdown_ms["data"] == 0
    assert 1000 * SLOW_S < told.verdict.recoverable_ms == pytest.approx(told.breakdown_ms["between"])


def test_logging_in_every_step_is_named(tmp_path, batches):
    logger = logging.getLogger("a user's")
    logger.propagate = False
    logger.addHandler(SlowHandler())
    told = record(tmp_path, batches, after=lambda step, model: logger.error("step %d", step))
    assert told.verdict.kind == "between-steps"
    assert "next forward pass: logging " in told.verdict.sentence
    assert "not recorded" not in told.verdict.sentence


def test_a_checkpoint_now_and_then_makes_long_steps(tmp_path, batches):
    def save(step, model):
        if step % 8 == 7:
            torch.save(model.state_dict(), SlowFile())

    told = record(tmp_path, batches, after=save)
    assert told.verdict.kind == "long-steps"
    assert "longer than the others (checkpoint " in told.verdict.sentence
    assert sum(told.breakdown_ms.values()) == pytest.approx(told.step_ms["usual"])


def test_validation_now_and_then_makes_long_steps(tmp_path, batches):
    def validate(step, model):
        if step % 8 == 7:
            with torch.no_grad():
                for _ in range(40):
                    model(torch.ones(4, 8))

    told = record(tmp_path, batches, after=validate)
    assert told.verdict.kind == "long-steps"
    assert "longer than the others (validation " in told.verdict.sentence
    assert told.as_json()["long_steps"]["causes"][0]["what"] == "validation"


def test_the_functions_are_restored(tmp_path, batches):
    before = (torch.save, logging.Logger.callHandlers, torch.distributed.Work.wait)
    record(tmp_path, batches[:3])
    assert (torch.save, logging.Logger.callHandlers, torch.distributed.Work.wait) == before
    assert load(tmp_path).notes == ()
