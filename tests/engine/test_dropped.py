"""Engines that nobody closes: dropped with their model they are collected; as long as the model lives, they work."""

import gc
import threading
import weakref
from typing import Any

import by_hand
import torch
import torch.distributed as dist
from torch import nn

import syncline
from ranks import run_ranks
from syncline.engine.inflight import wait_on_touch
from syncline.trace.record.recorder import process_recorder


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("syncline-")]


def everything(rank: int, world: int) -> list[str]:
    """Model, optimizer and engine are dropped with their last update (and buffers) in flight."""
    for options in ({}, {"compress": "powersgd(rank=2)"}, {"tune": False}):
        model = nn.Sequential(*by_hand.net(), nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        sync = syncline.attach(model, optimizer, **options)
        by_hand.train(rank, model, optimizer, range(3), by_hand=False)
        known: list[Any] = [weakref.ref(thing) for thing in (sync, model, optimizer)]
        threads = [t for t in threading.enumerate() if t.name.startswith("syncline-")]
        assert len(threads) > 3
        del model, optimizer, sync
        # The updates in flight hold the engine until they are done.
        for thread in threads:
            while thread.is_alive():
                gc.collect()
                thread.join(0.1)
        assert [thing() for thing in known] == [None] * 3
        assert not wait_on_touch.any_marked()
        assert process_recorder(torch.device("cpu"), engine=False).engines == 0
        dist.barrier()
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # no hook of a dropped engine is called
    assert "create_script_module" in torch.jit._recursive.create_script_module.__qualname__
    return ours()


def test_nothing_is_left_of_a_dropped_model() -> None:
    assert run_ranks(everything, 2) == [[], []]


def handle_only(rank: int, world: int) -> Any:
    """The result of attach is not kept, or the optimizer is built later: training goes on synchronised."""

    def case(rank: int, hand: bool, attach: Any) -> Any:
        results = []
        for kept in ("model and optimizer", "model", "part of the model"):
            model = by_hand.net()
            optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
            if not hand:
                whole = model if kept != "part of the model" else nn.ModuleList(model)
                syncline.attach(whole, *[optimizer] * (kept == "model and optimizer"))
                del whole
            gc.collect()
            if kept == "model":
                optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            by_hand.train(rank, model, optimizer, range(3), by_hand=hand)
            gc.collect()
            by_hand.train(rank, model, optimizer, range(3, 5), by_hand=hand)
            results.append(by_hand.values(model))
        return results

    return by_hand.both(rank, case)


def test_model_and_optimizer_keep_the_engine() -> None:
    for plain, attached in run_ranks(handle_only, 2):
        assert attached == plain
