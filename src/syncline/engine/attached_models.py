"""The models that are attached now: refuses a parameter of two engines, and parameters that were added or replaced."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from syncline._compat.fsdp import is_fsdp_managed
from syncline._compat.modules import module_tables
from syncline.engine.launch.units import Slot
from syncline.engine.other_wrappers import refuse_around_attached, refuse_wrapped, wrapper_of
from syncline.errors import UsageError


class AttachedEngine(Protocol):
    """An engine, open or closed."""

    model: nn.Module
    slots: Sequence[Slot]

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""


_BOTH = "nn.ModuleList([first, second]), with all optimizers"
_engines: "weakref.WeakSet[AttachedEngine]" = weakref.WeakSet()
_hooks: list[Any] = []
"""The one hook on modules that become part of others, while engines are open."""


def remember(engine: AttachedEngine) -> None:
    """An engine was made: from now on its model may not be wrapped, nor its parameters be attached again."""
    _engines.add(engine)
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_registered))


def forget(engine: AttachedEngine) -> None:
    """An engine was closed."""
    _engines.discard(engine)
    while _hooks and not _engines:
        _hooks.pop().remove()


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if wrapper_of(type(parent)) is not None and child is not None:
        attached = {id(slot.parameter) for engine in _others(None) for slot in engine.slots}
        refuse_around_attached(parent, child, attached)


def refuse_attached(model: nn.Module, named: Iterable[tuple[str, Tensor]], engine: object = None) -> None:
    """Raise if an open engine (but `engine`) averages one of these parameters.

    Frozen parameters may be in several models.
    """
    trained = {id(p): name for name, p in named if p.requires_grad}
    for other in _others(engine):
        if (shared := next((slot for slot in other.slots if id(slot.parameter) in trained), None)) is not None:
            if other.model is model:
                raise UsageError("this model is attached already: close() the first attachment before attaching again")
            raise UsageError(
                f"parameter '{trained[id(shared.parameter)]}' belongs to another attached model (there it is"
                f" '{shared.name}'): attach one module that holds both, {_BOTH}"
            )


def _others(engine: object) -> list[AttachedEngine]:
    return [other for other in _engines if other is not engine and not other.closed]


class ModelChanges:
    """Notices parameters that the model got after attach; they would not be averaged."""

    def __init__(self, model: nn.Module, slots: Sequence[Slot]) -> None:
        self._model, self._known = model, {id(slot.parameter) for slot in slots}
        self._remember()

    def check(self) -> None:
        """Raise if the model has a trained parameter that it did not have at attach. About 0.2 us per module."""
        if self._now() == self._ids:
            return
        if any(is_fsdp_managed(module) for module in self._model.modules()):
            refuse_wrapped(self._model)
        for name, p in self._model.named_parameters():
            if isinstance(p, nn.Parameter) and p.requires_grad and id(p) not in self._known:
                raise UsageError(
                    f"parameter '{name}' is not the one that was attached (a new module, load_state_dict(assign=True),"
                    " a conversion): call close() before you change a model's parameters, and attach it again"
                )
        self._remember()

    def _remember(self) -> None:
        """Note which objects the model consists of."""
        self._tables = module_tables(self._model)
        self._ids = self._now()

    def _now(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]
