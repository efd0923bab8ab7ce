"""What a step took of the processor: CPU time of the process, and how long its training thread stood in the queue.

The kernel counts both; reading them at a step's two ends costs a few microseconds. Linux alone tells of the queue.
"""

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Of the thread that opens it: nanoseconds on a processor, nanoseconds runnable but not running, turns."""

MOST_STEPS = 1_000_000
"""Steps that are kept, so that a long run has an end of what it takes."""

_BYTES = 64


class Usage:
    """Rows `(step, cpu_ns, delay_ns)`: CPU time of the whole process, and time in which the thread was runnable but
    not running. Where the kernel does not tell there are no rows."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, int]] = deque(maxlen=MOST_STEPS)
        self._file, self._thread = -1, 0
        self._before: tuple[int, int] | None = None
        self._now: tuple[int, int] | None = None

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """What was filed; the last `MOST_STEPS` of it."""
        return list(self._rows)

    def look(self) -> None:
        """A step begins or ends, on the thread that trains."""
        self._before, self._now = self._now, self._read()

    def keep(self, step: int) -> None:
        """File what happened between the last two looks under a step."""
        if self._before is not None and self._now is not None:
            self._rows.append((step, self._now[0] - self._before[0], self._now[1] - self._before[1]))

    def close(self) -> None:
        """Let the kernel's file go; the rows stay."""
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
                # The file stays with the thread that opened it.
                self.close()
                self._file, self._thread = os.open(SCHEDSTAT, os.O_RDONLY), thread
            delay = int(os.pread(self._file, _BYTES, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return time.process_time_ns(), delay


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
