"""Output of the benchmarks: environment and JSON files."""

import json
from pathlib import Path
from typing import Any

import torch

from syncline.files import write_text


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware on which the figures depend."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "device": str(name), "threads": torch.get_num_threads()}


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write the result atomically."""
    write_text(json.dumps(result, indent=1) + "\n", path)
