"""Writes torch's flight recorder, the last collectives that this rank called, for `syncline trace analyze`."""

import os
from pathlib import Path

import torch.distributed as dist

from syncline._compat.groups import flight_recorder_dump
from syncline.errors import UsageError

_NAME = "comm_lib_trace_rank_{}"
"""torch's own name for a dump of a rank."""


def dump_flight_recorder(folder: str | os.PathLike[str]) -> Path:
    """Write the last collectives of this rank into a folder; returns the file. Call it on every rank.

    It communicates with nobody, so a thread can call it while the training loop is blocked in a collective. NCCL writes
    such files by itself when a collective times out; Gloo does not.
    """
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group before the dump")
    target = Path(folder) / _NAME.format(dist.get_rank())
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(flight_recorder_dump())
    return target
