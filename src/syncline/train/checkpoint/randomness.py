"""Save, restore and seed the random generators that training may use: torch, Python and, if loaded, numpy."""

import importlib
import importlib.util
import random
import sys
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all generators as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "rest": [int(position), int(has_gauss), float(cached)],
        }
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned. On another kind of device, that device's generator keeps its seed."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    # A machine without numpy cannot draw from it either.
    if "numpy" in state and importlib.util.find_spec("numpy") is not None:
        numpy, saved = importlib.import_module("numpy"), state["numpy"]
        keys = numpy.array(saved["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], keys, *saved["rest"]))


def seed_all(seed: int) -> None:
    """Seed every generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
