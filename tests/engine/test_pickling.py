"""Pickles, copies and scripts of an attached model and optimizer are plain, also while updates are in flight."""

import copy
import io
import multiprocessing.reduction
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import by_hand
import torch
import torch.multiprocessing  # registers how tensors are sent to other processes
from torch import nn

import syncline
from ranks import run_ranks
from syncline.engine.inflight import wait_on_touch

X = torch.linspace(-1, 1, 12).view(2, 6)


class Own(nn.Sequential):
    """A model that decides by itself what is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Reduced(nn.Sequential):
    """A model that pickles itself, as torch.fx's modules do."""

    def __reduce__(self) -> Any:
        return _rebuild, (self.__dict__.copy(),)


def _rebuild(attributes: dict[str, Any]) -> Any:
    made = Reduced.__new__(Reduced)
    made.__dict__.update(attributes)
    return made


class KeepsAll(torch.optim.SGD):
    """An optimizer that pickles all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def saved(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    assert b"syncline" not in buffer.getvalue()
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def pickled(thing: Any) -> Any:
    data = pickle.dumps(thing)
    assert b"syncline" not in data
    return pickle.loads(data)


def sent(thing: Any) -> Any:
    """As `multiprocessing` sends arguments to a process that it spawns."""
    data = bytes(multiprocessing.reduction.ForkingPickler.dumps(thing))
    assert b"syncline" not in data
    return pickle.loads(data)


def traced(thing: Any) -> Any:
    return torch.jit.trace(thing, (X,))


def exported(thing: Any) -> Any:
    return torch.export.export(thing, (X,)).module()


COPIES: list[Callable[[Any], Any]] = [saved, pickled, sent, copy.deepcopy]
SCRIPTS: list[Callable[[Any], Any]] = [torch.jit.script, traced, exported]


def check_plain(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks, "no hooks"
    for p in model.parameters():
        assert type(p) is nn.Parameter
        assert not p._backward_hooks
        assert not getattr(p, "_post_accumulate_grad_hooks", None)
        assert not vars(p)
        assert not wait_on_touch.is_marked(p)


def models(rank: int, world: int) -> Any:
    """After each step, with updates in flight: a copy in one way, and what it computes."""
    warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated")

    def case(rank: int, hand: bool, attach: Any) -> Any:
        results = []
        for kind in (nn.Sequential, Own, Reduced):
            model = kind(*by_hand.net())
            users = model.register_forward_pre_hook(_users_hook)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            attach(model, optimizer)
            ways = [*COPIES, *(SCRIPTS if kind is nn.Sequential else ())]

            def after(step: int, kind: Any = kind, model: Any = model, ways: Any = ways, users: Any = users) -> Any:
                way = ways[step]
                if way is torch.jit.script:
                    users.remove()  # it has no types, as none of ours has
                made = way(model)
                if way in COPIES:
                    users_hook, *ours = made._forward_pre_hooks.values()
                    assert users_hook is _users_hook
                    # A model with its own way to pickle its attributes gets a hook that does nothing.
                    assert [type(hook) for hook in ours] == [type({}.get)] * (kind is not nn.Sequential and not hand)
                    made._forward_pre_hooks.clear()
                    check_plain(made)
                    made(X).sum().backward()  # of this rank alone
                    assert all(p.grad is not None for p in made.parameters())
                return made(X).tolist()

            results.append(by_hand.train(rank, model, optimizer, range(len(ways)), by_hand=hand, after=after))
            results.append(by_hand.values(model))
        return results

    return by_hand.both(rank, case)


def _users_hook(module: nn.Module, args: Any) -> None:
    """The user's own hooks are copied."""


def test_copies_of_a_model_are_plain() -> None:
    for plain, attached in run_ranks(models, 2):
        assert attached == plain


def optimizers(rank: int, world: int) -> Any:
    """Copies of the optimizer, alone and with its model: they step by themselves."""

    def case(rank: int, hand: bool, attach: Any) -> Any:
        results = []
        for kind in (torch.optim.SGD, KeepsAll):
            model = by_hand.net()
            optimizer: Any = kind(model.parameters(), lr=0.05, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if kind is torch.optim.SGD else None
            attach(model, optimizer, update="unit")
            ways = [saved, pickled, copy.deepcopy]

            def after(step: int, model: Any = model, optimizer: Any = optimizer, ways: Any = ways) -> Any:
                made_model, made = ways[step]((model, optimizer))
                alone = ways[step](optimizer)
                before = by_hand.values(model)
                by_hand.loss(made_model, rank, 40).backward()
                made.step()
                made.zero_grad()
                assert by_hand.values(model) == before, "a copy steps its own parameters"
                momentum = [e["momentum_buffer"].tolist() for e in alone.state.values()]
                return by_hand.values(made_model), momentum, type(alone.state)

            results.append(by_hand.train(rank, model, optimizer, range(len(ways)), by_hand=hand, after=after))
            if scheduler is not None:
                scheduler.step()
            results.append(by_hand.values(model))
        return results

    return by_hand.both(rank, case)


def test_copies_of_an_optimizer_are_plain() -> None:
    for plain, attached in run_ranks(optimizers, 2):
        assert attached == plain


def with_buffers(rank: int, world: int) -> list[int]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.attach(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    hooks = [len(copied._forward_pre_hooks) for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    sync.close()
    return hooks


def test_the_hook_of_buffers_does_not_go_into_copies() -> None:
    assert run_ranks(with_buffers, 2) == [[0, 0]] * 2
