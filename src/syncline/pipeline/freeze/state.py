"""The freeze state of a run, plain data, and `advance`, the pure function that moves it on at the end of an epoch.

The accuracy guard is here: when the held-out loss gets worse after a freeze, the blocks frozen since its best value
train again, and freezing pauses for 1, 2, 4, ... epochs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from syncline import spec
from syncline.errors import UsageError, short
from syncline.pipeline.freeze.policies import FREEZE_POLICIES, Progress

_COMMON = ("blocks", "every", "guard")
GUARD = 0.05
"""Held-out loss may be worse than its best value by this share before the guard acts."""


@dataclass(frozen=True)
class Settings:
    """A freeze spec, `schedule(alpha=0.3, blocks=encoder.layers, every=200, guard=0.05)`, in its parts."""

    policy: str
    blocks: str | None = None
    """The path of the list of blocks in the model; None finds it."""
    every: int = 0
    """Optimizer steps that count as an epoch; 0: the training loop says when an epoch ends."""
    guard: float = GUARD
    """The accuracy guard's limit; 0 switches it off."""


def parse(text: str) -> Settings:
    """The settings of a freeze spec. `blocks`, `every` and `guard` go with every policy; wrong ones are errors."""
    call = spec.parse_one(text)
    common = {key: call.kwargs[key] for key in _COMMON if key in call.kwargs}
    own = {key: value for key, value in call.kwargs.items() if key not in common}
    settings = spec.apply(spec.Call(call.name, (), common), Settings, str(spec.Call(call.name, call.args, own)))
    assert isinstance(settings, Settings)
    if settings.every < 0 or settings.guard < 0:
        raise UsageError(f"'{text}': every and guard are 0 or more")
    own_call, function = _found(settings.policy)
    if ":" in own_call.name:  # a user's function may count its calls: it is called at the end of an epoch alone
        spec.options(own_call, function, lead=1)
    else:
        ask(settings.policy, Progress(0, 1, 0, (0.0,), ()))
    return settings


@dataclass(frozen=True)
class Measured:
    """Measurements at the end of an epoch, the same on all ranks; None where nothing was measured."""

    norms: Sequence[float] | None = None
    """The gradient norm of each block."""
    changes: Sequence[float] | None = None
    """The change of each block's activations since the last epoch."""
    held_out_loss: float | None = None


@dataclass(frozen=True)
class Change:
    """One freeze, or one unfreeze by the guard."""

    epoch: int
    step: int
    frozen: int
    why: str


@dataclass(frozen=True)
class FreezeState:
    """How far freezing has come. `to_json` and `from_json` are exact."""

    policy: str
    blocks: int
    guard: float = GUARD
    epoch: int = 0
    """Epochs that have ended."""
    frozen: int = 0
    """Frozen blocks, counted from the input."""
    clock: int = 0
    """Epochs that the policy has seen: it pauses and goes back with the guard."""
    pause: int = 0
    """Epochs for which nothing freezes yet, after a regression."""
    regressions: int = 0
    best_loss: float | None = None
    best_frozen: int = 0
    best_clock: int = 0
    changes: tuple[tuple[float, ...], ...] = ()
    history: tuple[Change, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FreezeState":
        """The state that `to_json` gave; anything else is a `UsageError`."""
        try:
            plain = dict(values)
            plain["changes"] = tuple(tuple(float(v) for v in epoch) for epoch in plain.get("changes", ()))
            plain["history"] = tuple(Change(**change) for change in plain.get("history", ()))
            state = cls(**plain)
            if not 0 <= state.frozen <= state.blocks or state.epoch < 0:
                raise ValueError(f"{state.frozen} of {state.blocks} blocks frozen after {state.epoch} epochs")
        except (TypeError, ValueError) as error:
            raise UsageError(f"this is not a freeze state ({error}): {short(values)}") from None
        return state


def start(text: str, *, blocks: int) -> FreezeState:
    """The state before the first epoch of a model with that many blocks."""
    if blocks < 1:
        raise UsageError(
            "there are no blocks to freeze: name the model's list of layers, such as blocks=encoder.layers"
        )
    settings = parse(text)
    return FreezeState(settings.policy, blocks, settings.guard)


def ask(policy: str, progress: Progress) -> int:
    """What a policy says; a number that is not a whole one is a `UsageError`."""
    call, function = _found(policy)
    asked: Any = function(progress, **spec.options(call, function, lead=1))
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise UsageError(f"the freeze policy '{call}' returned {short(asked)}: return a number of blocks")
    return asked


def _found(policy: str) -> tuple[spec.Call, Callable[..., int]]:
    call = spec.parse_one(policy)
    return call, FREEZE_POLICIES.get(call.name)


def advance(state: FreezeState, measured: Measured, *, step: int = 0) -> FreezeState:
    """The state after one more epoch; `step` is noted in the history."""
    changes = state.changes if measured.changes is None else (*state.changes, tuple(map(float, measured.changes)))
    state = replace(state, epoch=state.epoch + 1, changes=changes)
    loss = measured.held_out_loss
    if loss is not None:
        if _regressed(state, loss):
            return _back(state, loss, step)
        if loss == loss and (state.best_loss is None or loss < state.best_loss):
            state = replace(state, best_loss=loss, best_frozen=state.frozen, best_clock=state.clock)
    if state.pause:
        return replace(state, pause=state.pause - 1)
    clock = state.clock + 1
    asked = ask(state.policy, Progress(clock, state.blocks, state.frozen, measured.norms, state.changes))
    frozen = max(state.frozen, min(asked, state.blocks))
    return _with_frozen(replace(state, clock=clock), frozen, step, state.policy)


def _regressed(state: FreezeState, loss: float) -> bool:
    """Whether the loss is worse than the best one, which was measured with fewer frozen blocks. True for NaN."""
    if not state.guard or state.best_loss is None or state.frozen <= state.best_frozen:
        return False
    return not loss <= state.best_loss + state.guard * abs(state.best_loss)


def _back(state: FreezeState, loss: float, step: int) -> FreezeState:
    why = f"held-out loss {loss:.4g}, best {state.best_loss:.4g}"
    pause = 2**state.regressions
    back = replace(state, clock=state.best_clock, pause=pause, regressions=state.regressions + 1)
    return _with_frozen(back, state.best_frozen, step, why)


def _with_frozen(state: FreezeState, frozen: int, step: int, why: str) -> FreezeState:
    if frozen == state.frozen:
        return state
    return replace(state, frozen=frozen, history=(*state.history, Change(state.epoch, step, frozen, why)))
