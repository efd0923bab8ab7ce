"""Faults that take one wait or rule out of the engine each: rows of the table must fail with every one of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from syncline.engine.backward import GradientTicket
from syncline.engine.inflight import unguarded, wait_on_touch
from syncline.engine.launch.units import UnitRun
from syncline.engine.optimizer.step import Stepper


@dataclass(frozen=True)
class Mutation:
    """A fault: a context that puts it into the engine, the way that shows it, and some rows that need it most."""

    apply: Callable[[], Any]
    way: str
    rows: tuple[str, ...]


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a wait."""


MUTATIONS: dict[str, Mutation] = {
    "a touched tensor is not waited for": Mutation(
        lambda: patch.object(wait_on_touch, "touch", _nothing),
        "fine",
        ("ema_right_after_step-fine", "parameter_by_clone-fine", "gradient_by_clone-fine"),
    ),
    "a touched gradient is not waited for": Mutation(
        lambda: patch.object(GradientTicket, "wait", _nothing),
        "fine",
        ("clip_grad_norm-fine", "gradients_read-fine", "gradient_by_clone-fine"),
    ),
    "forwards of modules do not wait": Mutation(
        lambda: patch.object(unguarded, "wait_in_forwards", lambda: _nothing),
        "fine",
        ("transformer_encoder_evaluated_on_its_fast_path-fine",),
    ),
    "functions that torch does not report do not wait": Mutation(
        lambda: patch.object(unguarded, "_install", _nothing),
        "fine",
        ("parameter_by_functional_grad-fine", "gradient_by_scripted_function-fine"),
    ),
    "memory that others share is not waited for": Mutation(
        lambda: patch.object(wait_on_touch, "shares_memory", lambda *_: False),
        "fine",
        ("alias_from_before_attach-fine", "state_dict_kept-fine"),
    ),
    "`optimizer.state` is read without a wait": Mutation(
        lambda: patch.object(Stepper, "_before_state", _nothing),
        "fine",
        ("optimizer_state_right_after_step-fine", "momentum_reset_by_hand-fine"),
    ),
    "a step does not commit residuals": Mutation(
        lambda: patch.object(UnitRun, "keep_states", _nothing),
        "powersgd",
        ("plain_sgd-powersgd", "accumulation-powersgd", "closure-powersgd"),
    ),
}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The engine with this fault; None: as it is."""
    if name is None:
        yield
        return
    with MUTATIONS[name].apply():
        yield
