"""A strict reader of IDX files (MNIST's format), plain or gzipped."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import UsageError

_UNSIGNED_BYTE = 0x08
# Several times the largest set in this format; a gzip of zeros must not fill the memory.
_MAX_BYTES = 1 << 30


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The uint8 tensor of an IDX file with that many dimensions; anything else is a `UsageError`."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            head = file.read(4 + 4 * dimensions)
            shape = _shape(head, path, dimensions)
            # One byte more than announced shows a file that is too long.
            body = file.read(prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}; fetch it again") from error
    if len(body) != prod(shape):
        more = "more" if len(body) > prod(shape) else f"only {len(body)}"
        raise UsageError(f"{path} is damaged: its header says {prod(shape)} bytes, it has {more}; fetch it again")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)


def _shape(head: bytes, path: Path, dimensions: int) -> tuple[int, ...]:
    if len(head) != 4 + 4 * dimensions or head[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise UsageError(f"{path} is not an IDX file of bytes with {dimensions} dimensions: fetch it again")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    if min(shape) < 1 or prod(shape) > _MAX_BYTES:
        raise UsageError(f"{path} announces the shape {shape}: 1 byte to {_MAX_BYTES >> 30} GiB is expected")
    return shape
