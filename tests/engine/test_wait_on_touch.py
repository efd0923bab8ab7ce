"""Marked tensors: touches wait for the ticket, and the class is restored when it is done."""

import copy
import io
import sys
import threading
import time

import pytest
import torch
from torch import nn

from syncline.engine.inflight import wait_on_touch


class Ticket:
    marked: list[torch.Tensor] | None = None

    def __init__(self) -> None:
        self.ended, self.waits = False, 0

    def wait(self) -> None:
        self.waits += 1

    def done(self) -> bool:
        return self.ended


def test_one_touch_releases_all_tensors_with_the_same_ticket() -> None:
    ticket, tensors = Ticket(), [torch.ones(2) for _ in range(3)]
    assert all(wait_on_touch.mark(tensor, ticket) for tensor in tensors)
    ticket.ended = True
    assert tensors[0].sum() == 2
    assert ticket.waits == 1
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 3
    assert not any(map(wait_on_touch.is_marked, tensors))
    assert ticket.marked is None, "and nothing is kept alive"


def test_every_touch_waits_until_the_ticket_is_done() -> None:
    ticket, first, second = Ticket(), torch.ones(2), torch.ones(2)
    for tensor in (first, second):
        wait_on_touch.mark(tensor, ticket)
    for tensor in (first, second, first):
        assert tensor.sum() == 2
    assert ticket.waits == 3
    assert wait_on_touch.is_marked(first)
    for tensor in (first, second):
        wait_on_touch.release(tensor)


def test_tensors_with_a_newer_ticket_stay_marked() -> None:
    before, after, first, second = Ticket(), Ticket(), torch.ones(2), torch.ones(2)
    for tensor in (first, second):
        wait_on_touch.mark(tensor, before)
    wait_on_touch.mark(second, after)
    before.ended = True
    assert first.sum() == 2
    assert not wait_on_touch.is_marked(first)
    assert wait_on_touch.is_marked(second)
    assert second.sum() == 2
    assert after.waits == 1
    wait_on_touch.release(second)


def test_other_threads_can_read_parameters_meanwhile() -> None:
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
            four = [Ticket() for _ in range(4)]
            for number, parameter in enumerate(parameters):
                assert wait_on_touch.mark(parameter, four[number % 4])
            for ticket in four:
                ticket.ended = True
            for parameter in parameters[::5]:
                wait_on_touch.touch(parameter)
            for parameter in parameters:
                wait_on_touch.release(parameter)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(before)
    assert not failed
    assert [type(parameter) for parameter in parameters] == [nn.Parameter] * 20
    assert not any(map(wait_on_touch.is_marked, parameters))


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_copies_of_a_marked_tensor_have_its_original_class(kind: type) -> None:
    ticket = Ticket()
    tensor = torch.ones(2) if kind is torch.Tensor else nn.Parameter(torch.ones(2))
    wait_on_touch.mark(tensor, ticket)
    deep = copy.deepcopy(tensor)
    assert type(deep) is kind
    assert deep.sum() == 2
    assert wait_on_touch.is_marked(tensor), "another stream has still to wait"
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is kind
    assert ticket.waits >= 2
    wait_on_touch.release(tensor)


def test_a_touch_does_not_remove_a_newer_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, tensor = Ticket(), Ticket(), nn.Parameter(torch.ones(2))
    wait_on_touch.mark(tensor, before)
    touch = wait_on_touch.touch

    def overtaken(one: torch.Tensor) -> None:
        touch(one)
        wait_on_touch.mark(tensor, after)  # another thread has stepped

    monkeypatch.setattr(wait_on_touch, "touch", overtaken)
    before.ended = True
    copy.deepcopy(tensor)
    torch.add(tensor, torch.ones(2))
    monkeypatch.undo()
    assert wait_on_touch.is_marked(tensor)
    assert tensor.sum() == 2
    assert after.waits
    wait_on_touch.release(tensor)
