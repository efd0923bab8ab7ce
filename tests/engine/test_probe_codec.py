"""Probes of codecs without a network."""

import pytest
import torch
from operator_tape import OperatorTape

from syncline import codecs
from syncline.codecs.build import LATE
from syncline.engine.tuning.probe_codec import cost_alone, cost_captured

CPU = torch.device("cpu")


@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "topk(0.1)", "powersgd(rank=2)", "powersgd(rank=2) | bf16"])
def test_a_probe_measures_every_stage_and_leaves_random_numbers_alone(spec: str) -> None:
    before = torch.get_rng_state()
    cost = cost_alone(spec, [(64, 32), (512, 256)], world=4, device=CPU)
    assert torch.equal(before, torch.get_rng_state())
    assert cost.decode(512 * 256) > 0
    assert cost.encode(512 * 256) > 0
    assert (cost.between(512 * 256) > 0) == (len(codecs.build(spec).rounds((512, 256), step=LATE)) > 1)
    assert cost.issue == 0, "only a GPU has a host that issues"


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "powersgd(rank=2) | bf16"])
def test_a_probe_of_captured_launches_replays_every_stage(spec: str) -> None:
    tape = OperatorTape()
    cost = cost_captured(spec, [(64, 32), (512, 256)], world=4, device=CPU, tape=tape)
    assert tape.captures == 2 * 2 * 3  # two shapes, the first run of each without; start, between messages, end
    assert cost.encode(512 * 256) > 0
    assert cost.between(512 * 256) > 0
    assert cost.decode(512 * 256) > 0
    assert cost.issue > 0
