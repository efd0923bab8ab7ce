"""The fused operators on this machine's device (CUDA where there is one) against the plain reference."""

import operator_checks
import pytest
import torch

from syncline.codecs import ops

CPU = torch.device("cpu")


def test_operators_agree_with_the_reference_on_the_cpu():
    assert operator_checks.run(CPU, sizes=(1, 1000, 5000)) == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_operators_agree_with_the_reference_on_cuda():
    assert operator_checks.run(torch.device("cuda")) == []


def test_the_checks_find_a_planted_fault(monkeypatch):
    correct = ops.sign_encode

    def faulty(x, **options):
        packed, pos, neg = correct(x, **options)
        packed[-1] ^= 1
        return packed, pos, neg

    monkeypatch.setattr(ops, "sign_encode", faulty)
    assert any(line.startswith("sign") for line in operator_checks.run(CPU, sizes=(1000,)))
