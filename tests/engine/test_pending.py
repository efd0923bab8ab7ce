"""Tensors in flight: who waits for what, and when a tensor is itself again."""

import copy
import io
import sys
import threading
import time

import pytest
import torch
from torch import nn

from syncline.engine.inflight import tickets as pending


class Ticket:
    marked: list[torch.Tensor] | None = None

    def __init__(self) -> None:
        self.ended, self.waits = False, 0

    def wait(self) -> None:
        self.waits += 1

    def done(self) -> bool:
        return self.ended


def test_one_touch_lets_all_go_that_wait_for_the_same() -> None:
    ticket, tensors = Ticket(), [torch.ones(2) for _ in range(3)]
    assert all(pending.mark(tensor, ticket) for tensor in tensors)
    ticket.ended = True
    assert tensors[0].sum() == 2
    assert ticket.waits == 1
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 3
    assert not any(map(pending.is_pending, tensors))
    assert ticket.marked is None, "and nothing is kept alive"


def test_until_it_is_settled_every_touch_waits() -> None:
    ticket, first, second = Ticket(), torch.ones(2), torch.ones(2)
    for tensor in (first, second):
        pending.mark(tensor, ticket)
    for tensor in (first, second, first):
        assert tensor.sum() == 2
    assert ticket.waits == 3
    assert pending.is_pending(first)
    for tensor in (first, second):
        pending.release(tensor)


def test_what_waits_for_something_else_by_now_is_left() -> None:
    before, after, first, second = Ticket(), Ticket(), torch.ones(2), torch.ones(2)
    for tensor in (first, second):
        pending.mark(tensor, before)
    pending.mark(second, after)
    before.ended = True
    assert first.sum() == 2
    assert not pending.is_pending(first)
    assert pending.is_pending(second)
    assert second.sum() == 2
    assert after.waits == 1
    pending.release(second)


def test_a_thread_that_reads_parameters_meanwhile_changes_nothing() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(20)]
    stop, failed = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                for parameter in parameters:
                    assert float(parameter.detach().sum()) == 2
            except BaseException as error:
                failed.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for reader in readers:
            reader.start()
        until = time.monotonic() + 2
        while time.monotonic() < until and not failed:
            tickets = [Ticket() for _ in range(4)]
            for number, parameter in enumerate(parameters):
                assert pending.mark(parameter, tickets[number % 4])
            for ticket in tickets:
                ticket.ended = True
            for parameter in parameters[::5]:
                pending.touch(parameter)
            for parameter in parameters:
                pending.release(parameter)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(before)
    assert not failed
    assert [type(parameter) for parameter in parameters] == [nn.Parameter] * 20
    assert not any(map(pending.is_pending, parameters))


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_copies_of_a_tensor_that_others_still_wait_for_are_themselves(kind: type) -> None:
    ticket = Ticket()
    tensor = torch.ones(2) if kind is torch.Tensor else nn.Parameter(torch.ones(2))
    pending.mark(tensor, ticket)
    deep = copy.deepcopy(tensor)
    assert type(deep) is kind
    assert deep.sum() == 2
    assert pending.is_pending(tensor), "another stream has still to wait"
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is kind
    assert ticket.waits >= 2
    pending.release(tensor)


def test_who_has_waited_takes_no_newer_mark_away(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, tensor = Ticket(), Ticket(), nn.Parameter(torch.ones(2))
    pending.mark(tensor, before)
    touch = pending.touch

    def overtaken(one: torch.Tensor) -> None:
        touch(one)
        pending.mark(tensor, after)  # another thread has stepped

    monkeypatch.setattr(pending, "touch", overtaken)
    before.ended = True
    copy.deepcopy(tensor)
    torch.add(tensor, torch.ones(2))
    monkeypatch.undo()
    assert pending.is_pending(tensor)
    assert tensor.sum() == 2
    assert after.waits
    pending.release(tensor)
