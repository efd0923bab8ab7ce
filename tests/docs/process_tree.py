"""Run a shell command on two cores, and measure the peak of the memory that all its processes use together."""

import os
import re
import sys
import threading
import time
from pathlib import Path

from command import Command


class Measured(Command):
    """A command line in bash; `peak_bytes` and `seconds` are set when it has finished."""

    def __init__(self, text, *, cwd):
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.peak_bytes, self.seconds, self._began = 0, 0.0, time.monotonic()
        super().__init__("-c", text, cwd=cwd, program=["taskset", "-c", cores, "bash"], PATH=path)
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def finish(self, timeout=600):
        super().finish(timeout)
        self.seconds = time.monotonic() - self._began
        self._sampler.join()
        return self

    def _sample(self):
        while self.running():
            self.peak_bytes = max(self.peak_bytes, sum(map(_own_bytes, self.pids())))
            time.sleep(0.2)


def _own_bytes(pid):
    """Memory of a process; pages that several processes share are divided among them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
