"""The fields of a rank's part of a checkpoint, and a check of all of them before a rank loads it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from syncline.train.config import FIXED_SETTINGS, Train

FORMAT = 1
"""The version of the format that is written and read."""


def find_mistake(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a rank's part: the first field that is missing or of another kind."""
    needed = _FIELDS if content["rank"] else _FIELDS | _FIELDS_OF_RANK_0
    for key, fits in needed.items():
        if key not in content:
            return f"'{key}' is missing"
        if not fits(content[key]):
            return f"'{key}' is not what a checkpoint holds"
    steps = content["step"]
    if any(len(content["history"][key]) != steps for key in ("losses", "step_ms")):
        return f"'history' does not have {steps} steps"
    if not all(step <= steps for step in content["history"]["resumed_at"]):
        return "'history' resumes after its last step"
    if not _list_of(_tensors)(content.get("freeze", [])):  # missing in checkpoints of earlier versions
        return "'freeze' is not what a checkpoint holds"
    phases = {key: len(content[key]) for key in needed if key in _BY_PHASE}
    return None if len(set(phases.values())) == 1 else f"'{min(phases)}' and '{max(phases)}' have different lengths"


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _positive(value: Any) -> bool:
    return _count(value) and value > 0


def _text(value: Any) -> bool:
    return type(value) is str


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _tensor(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"


def _vector(dtype: torch.dtype) -> Callable[[Any], bool]:
    return lambda value: _tensor(value) and value.dtype == dtype and value.dim() == 1


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _table(fields: Mapping[str, Callable[[Any], bool]], **optional: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A dict with these keys; others are not looked at."""

    def fits(value: Any) -> bool:
        return (
            type(value) is dict
            and all(key in value and check(value[key]) for key, check in fields.items())
            and all(check(value[key]) for key, check in optional.items() if key in value)
        )

    return fits


def _tensors(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str and _tensor(item) for key, item in value.items())


def _settings(value: Any) -> bool:
    default = Train()
    kinds = {key: type(getattr(default, key)) for key in FIXED_SETTINGS}
    if type(value) is not dict:
        return False
    before = {"freeze": default.freeze, **value}  # missing in checkpoints of earlier versions
    return all(type(before.get(key)) is kind for key, kind in kinds.items())


_EPOCH = _table(
    {"epoch": _count, "train_s": _number, "test_s": _number_or_none, "loss": _number},
    accuracy=_number_or_none,
    test_loss=_number_or_none,
    frozen=_count,
)
_HISTORY = _table(
    {
        "losses": _vector(torch.float64),
        "step_ms": _vector(torch.float64),
        "epochs": _list_of(_EPOCH),
        "accuracy": _number_or_none,
        "epoch_s": _number,
        "resumed_at": _list_of(_count),
    }
)
_RANDOM = _table(
    {
        "torch": _vector(torch.uint8),
        "python": _table({"version": _count, "numbers": _vector(torch.int64), "gauss": _number_or_none}),
    },
    cuda=_vector(torch.uint8),
    numpy=_table({"kind": _text, "keys": _vector(torch.int64), "rest": _list_of(_number)}),
)
_OPTIMIZER = _table(
    {"state": lambda value: type(value) is dict, "param_groups": _list_of(lambda group: type(group) is dict)}
)
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _count,
    "rank": _count,
    "workers": _positive,
    "strategy": _text,
    "train": _settings,
    "steps": _positive,
    "history": _HISTORY,
    "random": _RANDOM,
    "buffers": _list_of(_tensors),
    "synchronisers": _list_of(_tensors),
}
_FIELDS_OF_RANK_0: dict[str, Callable[[Any], bool]] = {
    "parameters": _list_of(_tensors),
    "optimizers": _list_of(_OPTIMIZER),
}
_BY_PHASE = ("buffers", "synchronisers", "parameters", "optimizers")
