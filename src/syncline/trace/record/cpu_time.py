"""CPU time of each step: what the process used, and how long its training thread was runnable but not running.

The kernel counts both. Reading them at the start and end of a step costs a few microseconds. Only Linux reports the
time in the run queue.
"""

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""For the thread that opens it: nanoseconds on a processor, nanoseconds runnable but not running, time slices."""

MAX_STEPS = 1_000_000
"""How many steps are kept; it bounds the memory of a long run."""


class StepCpuTimes:
    """Rows `(step, cpu_ns, delay_ns)`: CPU time of the process, and time its thread was runnable but not running.

    There are no rows where the kernel does not report them.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, int]] = deque(maxlen=MAX_STEPS)
        self._file, self._thread = -1, 0
        self._before: tuple[int, int] | None = None
        self._now: tuple[int, int] | None = None

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """The rows of the last `MAX_STEPS` steps."""
        return list(self._rows)

    def sample(self) -> None:
        """Read the counters. The training thread calls this where a step starts or ends."""
        self._before, self._now = self._now, self._read()

    def add(self, step: int) -> None:
        """Add a row for what passed between the last two samples."""
        if self._before is not None and self._now is not None:
            self._rows.append((step, self._now[0] - self._before[0], self._now[1] - self._before[1]))

    def close(self) -> None:
        """Close the kernel's file; the rows stay."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file, self._thread = -1, 0
        self._before = self._now = None

    def __del__(self) -> None:
        self.close()

    def _read(self) -> tuple[int, int] | None:
        if not hasattr(os, "pread"):  # Windows
            return None
        thread = threading.get_ident()
        try:
            if thread != self._thread:
                # An open file reports the thread that opened it.
                self.close()
                self._file, self._thread = os.open(SCHEDSTAT, os.O_RDONLY), thread
            delay = int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return time.process_time_ns(), delay


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
