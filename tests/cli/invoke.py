"""The command line in this process, with the folder it runs in and its output; torch is loaded once."""

import contextlib
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from syncline.cli.main import main


class Invoke:
    """Call the command line in a folder: `code`, `out` and `err` of each call."""

    def __init__(self, monkeypatch, capfd):
        self._patch, self._capture = monkeypatch, capfd

    def __call__(self, *args):
        self._patch.setattr(sys, "argv", ["syncline", *map(os.fspath, map(_plain, args))])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = self._capture.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)


def _plain(arg):
    return arg if isinstance(arg, os.PathLike) else str(arg)


@contextlib.contextmanager
def time_limit(seconds):
    """Raise in this thread if something takes longer, such as opening a pipe that nobody writes to."""

    def stop(number, frame):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
