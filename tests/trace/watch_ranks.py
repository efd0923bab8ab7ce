"""Rank functions of the tests of `SYNCLINE_WATCH`, in a module so that other processes can import them."""

import logging
import os
import time

import torch
import torch.distributed as dist
from recording_ranks import Loop

from syncline.trace import recording
from syncline.trace.record import straggler_watch

LATE_S, PERIOD_S, MOST_S = 0.05, 0.3, 40


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def watched(rank, world_size, kind, late, folder):
    """Train until something is said, or until the time is up; returns what this rank logged, and the parameters."""
    os.environ["SYNCLINE_WATCH"] = "1"
    straggler_watch.PERIOD_S = PERIOD_S
    lines = Lines()
    logging.getLogger("syncline").addHandler(lines)
    loop = Loop(rank, kind)
    if kind == "attach":
        _train(loop, rank, late, lines)
    else:
        with recording(loop.model, loop.optimizer, path=f"{folder}/trace.json.gz"):
            _train(loop, rank, late, lines)
    values = loop.close().tolist()
    logging.getLogger("syncline").removeHandler(lines)
    return [text for text in lines.texts if "watch" in text], values


def _train(loop, rank, late, lines):
    until, stop = time.monotonic() + MOST_S, torch.zeros(1)
    while not stop:
        if rank == late:
            time.sleep(LATE_S)
        loop.step()
        stop += any("watch" in text for text in lines.texts) or time.monotonic() > until
        dist.all_reduce(stop)
