"""Codec state by parameter name: gathered from units, made one flat dict, read back and checked."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from syncline import codecs
from syncline.engine.launch.units import UnitRun
from syncline.errors import UsageError

STEP_KEY = "syncline.step"

States = dict[str, dict[str, Tensor]]


def gathered(units: Iterable[UnitRun], shapes: Mapping[str, tuple[int, ...]]) -> States:
    """What the units have committed, by parameter; parts of one parameter are put together again."""
    pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for unit in units:
        for launch in unit.launches:
            for cell in launch.cells:
                for name, key, first, tensor in cell.dump():
                    pieces.setdefault((name, key), []).append((first, tensor))
    states: States = {}
    for (name, key), parts in pieces.items():
        if len(parts) == 1:
            states.setdefault(name, {})[key] = parts[0][1]
        else:
            whole = torch.cat([t.reshape(-1) for _, t in sorted(parts, key=lambda part: part[0])])
            states.setdefault(name, {})[key] = whole.view(shapes[name])
    return states


def flat_state(states: Mapping[str, Mapping[str, Tensor]], step: int) -> dict[str, Tensor]:
    """`"<parameter>.<key>"` to tensors of their own, and the step."""
    flat = {path: tensor.clone() for path, tensor in codecs.flatten(states).items()}
    return {**flat, STEP_KEY: torch.tensor(step)}


def read_state(state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> tuple[States, int]:
    """What `flat_state` made, if it is of a model with these parameters."""
    states = codecs.unflatten({path: tensor for path, tensor in state.items() if path != STEP_KEY})
    if odd := sorted(set(states) - set(parameters)):
        raise UsageError(f"the state has '{odd[0]}', which the model has not: is it of another model?")
    for name, tensors in states.items():
        error, values = tensors.get("error"), parameters[name].numel()
        if error is not None and error.numel() != values:
            raise UsageError(
                f"the residual of '{name}' has {error.numel()} values and the parameter {values}: is it of another"
                " model?"
            )
    return states, int(state.get(STEP_KEY, torch.tensor(0)))
