"""Runs the real command line, and finds what it left behind."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

TESTS = Path(__file__).parents[1]
SYNCLINE = [sys.executable, "-m", "syncline"]
PATHS = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
"""PYTHONPATH of commands: models and strategies of the tests, and the same syncline as the tests."""


class Command:
    """A `syncline` process whose descendants can be found by a mark in their environment."""

    def __init__(self, *args, cwd, program=None, **variables):
        self.mark = f"mark-{uuid.uuid4().hex}"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment |= {"SYNCLINE_TEST_MARK": self.mark, "PYTHONPATH": PATHS, "COLUMNS": "120", **variables}
        self.process = subprocess.Popen(
            [*(program or SYNCLINE), *map(str, args)],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def running(self):
        """Whether it has not ended."""
        return self.process.poll() is None

    def finish(self, timeout=100):
        """Wait; `code`, `out`, `err` are set."""
        self.out, self.err = self.process.communicate(timeout=timeout)
        self.code = self.process.returncode
        return self

    def wait_for(self, text, timeout=60):
        """Read standard output until a line holds `text`."""
        deadline = time.monotonic() + timeout
        for line in self.process.stdout:
            if text in line:
                return line
            assert time.monotonic() < deadline
        raise AssertionError(f"'{text}' never came: {self.process.stderr.read()}")

    def left(self, patience=10.0):
        """Processes of this command that still run, after some patience for the ones that are just ending."""
        deadline = time.monotonic() + patience
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    def pids(self):
        """Its processes that run now."""
        return [pid for pid, _ in self._alive()]

    def _alive(self):
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if self._is_ours(entry) and "Z" not in (entry / "stat").read_text().split(")")[1][:3]:
                    found.append((int(entry.name), (entry / "cmdline").read_bytes()))
            except OSError:
                continue
        return found

    def _is_ours(self, entry):
        return self.mark.encode() in (entry / "environ").read_bytes()


def run(*args, cwd, timeout=100, **variables):
    """Run to the end; nothing may be left."""
    command = Command(*args, cwd=cwd, **variables).finish(timeout)
    assert command.left() == []
    return command


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text())
