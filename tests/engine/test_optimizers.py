"""Optimizers that attach was not given, that were built anew or are shared by models, and steps with arguments."""

import inspect
import logging
from typing import Any

import by_hand
import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.engine.optimizer import partial_step
from syncline.errors import UsageError


class Said(logging.Handler):
    """What the engine has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("syncline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# -- found when they step


def compressed(rank: int, given: str) -> tuple[list[Any], list[str], int, bool]:
    """Eight steps with top-k, which needs its residuals; the optimizer is given to attach, or is not."""
    said = Said()
    model = by_hand.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if given == "another one":
        first = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sync = syncline.attach(model, first, compress="topk(0.1)")
        del first
    else:
        named = (optimizer,) if given == "given" else ()
        sync = syncline.attach(model, *named, compress="topk(0.1)")
    by_hand.train(rank, model, optimizer, range(8), by_hand=False)
    residuals = sum(k.endswith(".error") for k in sync.state_dict())
    by_units = "step" in vars(optimizer)
    seen = by_hand.values(model), [t for t in said.texts if "found" in t], residuals, by_units
    assert sync.step == 8
    sync.close()
    assert "step" not in vars(optimizer)
    return seen


def found(rank: int, world: int) -> list[Any]:
    return [compressed(rank, given) for given in ("given", "not given", "another one")]


def test_an_optimizer_is_found_when_it_steps_and_error_feedback_works() -> None:
    for rank, (given, *others) in enumerate(run_ranks(found, 2)):
        assert given[1] == []
        for values, said, residuals, by_units in others:
            assert values == given[0]
            assert residuals == given[2] > 0
            assert by_units
            assert len(said) == (rank == 0)
            assert all("found the optimizer SGD at its first step" in text for text in said)


def shared(rank: int, world: int) -> Any:
    """One optimizer over two attached models (an encoder and a decoder), given to none, one or both of them."""

    def case(rank: int, hand: bool, attach: Any) -> Any:
        results = []
        for given in range(3):
            encoder, decoder = by_hand.net(), by_hand.net(1)
            decoder[0] = nn.Linear(3, 8)
            both = nn.Sequential(encoder, decoder)
            optimizer: Any = torch.optim.Adam(both.parameters(), lr=0.05)
            for i, model in enumerate((encoder, decoder)):
                attach(model, *[optimizer] * (i < given))
            by_hand.train(rank, both, optimizer, range(5), by_hand=hand)
            results.append((by_hand.values(both), [e["exp_avg"].tolist() for e in optimizer.state.values()]))
        return results

    return by_hand.both(rank, case)


def test_one_optimizer_steps_two_attached_models() -> None:
    for plain, attached in run_ranks(shared, 2):
        assert attached == plain


def in_backward(rank: int, world: int) -> str:
    """Each parameter has an optimizer that steps in a hook, when only this rank's gradient is there."""
    model = by_hand.net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    sync = syncline.attach(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(UsageError) as error:
        by_hand.loss(model, rank, 0).backward()
    del sync
    return str(error.value)


def test_a_step_inside_the_backward_pass_is_refused() -> None:
    for text in run_ranks(in_backward, 2):
        assert "steps inside the backward pass" in text


# -- steps with arguments


class Scaled(torch.optim.SGD):
    """An optimizer of the user's: `step` has other arguments and returns a value."""

    def step(self, closure: Any = None, *, lr_scale: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= lr_scale
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= lr_scale
        return result, lr_scale


class Positional(torch.optim.Optimizer):
    """Its `step` takes numbers by position, and `zero_grad` nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, lr: float, norm: float | None = None) -> float:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-lr / (norm or 1.0))
        return lr

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def arguments(rank: int, world: int) -> Any:
    """Every way to call these steps, under schedulers that were made before and after attach."""

    def case(rank: int, hand: bool, attach: Any) -> Any:
        results: list[Any] = []
        for kind, update in ((Scaled, None), (Scaled, "unit"), (Positional, None), (Positional, "unit")):
            model = by_hand.net()
            optimizer: Any = kind(model.parameters()) if kind is Positional else kind(model.parameters(), lr=0.1)
            early = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if update is None else None
            attach(model, optimizer, update=update)
            scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = by_hand.loss(model, rank, 50)
                loss.backward()
                if hand:
                    by_hand.average(model)
                return loss

            if kind is Positional:
                ways: list[Any] = [lambda o: o.step(0.1), lambda o: o.step(0.1, 2.0), lambda o: o.step(0.1, norm=4.0)]
            else:
                ways = [
                    lambda o: o.step(), lambda o: o.step(None, lr_scale=0.5), lambda o: o.step(lr_scale=0.25),
                    lambda o: o.step(closure=None), lambda o: o.step(closure, lr_scale=0.5), lambda o: o.step(closure),
                ]  # fmt: skip
            for number, way in enumerate(ways):
                by_hand.loss(model, rank, number).backward()
                if hand:
                    by_hand.average(model)
                returned = way(optimizer)
                scheduler.step()
                optimizer.zero_grad()
                # A step by units returns before the values are there.
                if update is None:
                    results.append(_numbers(returned))
            results.append(by_hand.values(model))
        return results

    return by_hand.both(rank, case)


def _numbers(returned: Any) -> Any:
    return [float(x) if x is not None else None for x in (returned if isinstance(returned, tuple) else (returned,))]


def test_steps_with_arguments_are_passed_on_and_return_their_value() -> None:
    for plain, attached in run_ranks(arguments, 2):
        assert attached == plain


def hooks_and_wrappers(rank: int, world: int) -> None:
    """Hooks that change arguments, signatures for those who inspect them, and wrappers that outlive the engine."""
    model = by_hand.net()
    optimizer: Any = Scaled(model.parameters(), lr=0.1)
    before = inspect.signature(optimizer.step)
    sync = syncline.attach(model, optimizer)
    assert inspect.signature(optimizer.step) == before
    calls: list[Any] = []
    inner = optimizer.step

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return inner(*args, **kwargs)

    optimizer.step = wrapper  # as Accelerate does
    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: (args, {"lr_scale": 0.5}))
    by_hand.loss(model, rank, 0).backward()
    assert optimizer.step() == (None, 0.5)
    handle.remove()
    sync.close()
    assert optimizer.step(lr_scale=2.0) == (None, 2.0), "the wrapper stays, and reaches the optimizer's own step"
    assert calls == [{}, {"lr_scale": 2.0}]


def test_hooks_signatures_and_wrappers() -> None:
    run_ranks(hooks_and_wrappers, 2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("Rprop", {}),
    ],
)
def test_lists_of_small_parameters_are_stepped_with_the_same_bits(kind: str, options: dict[str, Any]) -> None:
    ends = []
    for lists in (False, True):
        numbers = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=numbers)) for shape in ((1000,), (37,), (33, 65))]
        optimizer = getattr(torch.optim, kind)(parameters, lr=1e-2, **options)
        groups = [0] if partial_step.steps_as_lists(optimizer, optimizer.param_groups[0], parameters) else []
        assert groups == [0]
        for _ in range(5):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=numbers)
            with partial_step.stepping_as_lists(optimizer, groups if lists else []):
                optimizer.step()
        assert optimizer.param_groups[0]["foreach"] is None
        ends.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_lists_are_used_only_where_torch_takes_them_and_they_pay() -> None:
    small = [nn.Parameter(torch.zeros(8)) for _ in range(3)]
    large = [nn.Parameter(torch.zeros(1 << 15)) for _ in range(3)]

    def lists(parameters: Any, kind: Any = torch.optim.Adam, **options: Any) -> bool:
        optimizer = kind(parameters, **options)
        return partial_step.steps_as_lists(optimizer, optimizer.param_groups[0], parameters)

    assert lists(small)
    assert not lists(large)
    assert not lists(small[:1])
    assert not lists(small, foreach=False)
    assert not lists(small, fused=True)
    assert not lists(small, lr=torch.tensor(0.1))
    assert not lists(small, torch.optim.NAdam), "other bits"
    assert not lists(small, type("Adam", (torch.optim.Adam,), {})), "a class of the user's"
