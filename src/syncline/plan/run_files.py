"""Files of a `syncline(auto)` run for later predictions: `plan.toml`, `costs.json`, `errors.json`, `shapes.json`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from syncline.errors import UsageError
from syncline.files import read_json, reason
from syncline.plan.costs import Costs, load_costs
from syncline.plan.errors import DEFAULT_ERROR, Budget, Errors, errors_of
from syncline.plan.file import load
from syncline.plan.frozen_parameters import trained
from syncline.plan.table import Plan
from syncline.plan.unit import Shape

VERSION = 1
PLAN, COSTS, SHAPES, ERRORS = "plan.toml", "costs.json", "shapes.json", "errors.json"


@dataclass(frozen=True)
class Recorded:
    """A measured job, and the plan in use at its end."""

    shapes: tuple[Shape, ...]
    """The parameters that the plan was made for; others were frozen."""
    costs: Costs
    plan: Plan
    """The plan of these parameters."""
    strategy: str
    device: str
    planned_at: int
    """Number of steps completed when the plan came into use."""
    errors: Errors | None = None
    """What codecs lose on the job's gradients; None if that was not measured."""

    @property
    def budget(self) -> Budget:
        """The error budget that the run's plan was made with, or the default one."""
        error, adaptive = (self.plan.about.get(key) for key in ("error_budget", "adaptive"))
        return Budget(float(error) if isinstance(error, int | float) else DEFAULT_ERROR, adaptive=adaptive is True)


def shapes_text(
    shapes: Sequence[Shape], *, strategy: str, device: str, planned_at: int, frozen: Sequence[Shape] = ()
) -> str:
    """The text of `shapes.json`: the parameters, strategy and device, which `costs.json` does not have."""
    rows, still = (
        [[s.name, list(s.shape), str(s.dtype).removeprefix("torch.")] for s in some] for some in (shapes, frozen)
    )
    facts = {"version": VERSION, "strategy": strategy, "device": device, "planned_at": planned_at}
    return json.dumps({**facts, "shapes": rows, "frozen": still}, indent=1) + "\n"


def load_recorded(folder: Path) -> Recorded:
    """Read the files from a strategy's folder of a run."""
    costs, plan = load_costs(folder / COSTS), load(folder / PLAN)
    file = folder / SHAPES
    try:
        table = read_json(file)
        if table["version"] != VERSION:
            raise UsageError(
                f"{file} is not of version {VERSION}: run syncline train --strategy 'syncline(auto, tune=full)' again"
            )
        shapes, frozen = (
            tuple(Shape(str(name), tuple(map(int, dims)), _dtype(dtype)) for name, dims, dtype in rows)
            for rows in (table["shapes"], table.get("frozen", []))
        )
        facts = str(table["strategy"]), str(table["device"]), int(table["planned_at"])
    except OSError as error:
        raise UsageError(f"cannot read {file}, which belongs to {COSTS}: {reason(error)}") from None
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{file} does not hold a model's parameters: {error!r}") from None
    if costs.world < 2:
        raise UsageError(f"{folder / COSTS} was measured on {costs.world} rank: run on 2 or more")
    try:
        plan.check([*shapes, *frozen])
    except UsageError as error:
        raise UsageError(f"{folder / PLAN} and {file} are not of one run: {error}") from None
    return Recorded(shapes, costs, trained(plan, shapes), *facts, _errors(folder / ERRORS))


def _errors(file: Path) -> Errors | None:
    """The errors of a run; runs of earlier versions have none."""
    if not file.is_file():
        return None
    try:
        return errors_of(read_json(file))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {reason(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{file} does not hold errors of codecs: delete it, or measure again ({error!r})") from None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"'{name}' is not a dtype")
    return found
