"""Codecs: what is sent. Compressors are generators that yield communication requests; see docs/codecs.md."""

from syncline.codecs import algorithms as algorithms
from syncline.codecs.build import Codec, Round, available, build
from syncline.codecs.coder import DENSE, Coder, Payload, cast, coder
from syncline.codecs.definition import CODECS, codec
from syncline.codecs.group import Batch, batches
from syncline.codecs.lockstep import Lockstep, direct, lockstep
from syncline.codecs.program import Run
from syncline.codecs.requests import Gather, Mean, Merge, Out, Request, Result, Steps, Sum
from syncline.codecs.state import State, flatten, reshard, unflatten

__all__ = [
    "CODECS",
    "DENSE",
    "Batch",
    "Codec",
    "Coder",
    "Gather",
    "Lockstep",
    "Mean",
    "Merge",
    "Out",
    "Payload",
    "Request",
    "Result",
    "Round",
    "Run",
    "State",
    "Steps",
    "Sum",
    "available",
    "batches",
    "build",
    "cast",
    "codec",
    "coder",
    "direct",
    "flatten",
    "lockstep",
    "reshard",
    "unflatten",
]
