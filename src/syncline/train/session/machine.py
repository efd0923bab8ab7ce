"""The machine under a run: versions and hardware for the report, and how busy other programs keep it."""

import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

import syncline
from syncline.trace.record.cpu_time import available_cores


def environment() -> dict[str, Any]:
    """Versions and hardware, as the report shows them."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "syncline": syncline.__version__,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": available_cores(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "command": " ".join(["syncline", *sys.argv[1:]]),
    }


def busy_share(seconds: float = 0.25) -> float:
    """The share of the machine's CPU time that is used while this process sleeps."""

    def reading() -> tuple[int, int]:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        times = [int(word) for word in words]
        return sum(times), times[3] + times[4]  # idle, and waiting for a disk

    total, idle = reading()
    time.sleep(seconds)
    later, still = reading()
    return 1 - (still - idle) / max(1, later - total)


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found.group(1).strip() if found else platform.processor()
