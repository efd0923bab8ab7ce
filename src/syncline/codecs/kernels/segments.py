"""Several tensors in one launch: the table that tells each program which piece of the flat tensor is its own."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4096)
def chunk_table(lengths: tuple[int, ...], tile: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of chunks and of pieces, as int64 tensors.

    A chunk: first value, values, first byte, piece, first value within the piece. A piece: first chunk, last, length.

    Pieces are cut into chunks of `tile` values; each piece's packed bytes start on a byte of their own. The copy
    to the device happens once for a layout and is complete on return, so any stream may use the table.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    pieces: list[tuple[int, int, int]] = []
    value = byte = 0
    for piece, length in enumerate(lengths):
        first = len(rows)
        for start in range(0, length, tile):
            size = min(tile, length - start)
            rows.append((value + start, size, byte + start * bits // 8, piece, start))
        value += length
        byte += (length * bits + 7) // 8
        pieces.append((first, len(rows), length))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
    return table.to(device), torch.tensor(pieces, dtype=torch.int64).view(-1, 3).to(device)


def packed_bytes(lengths: tuple[int, ...], bits: int) -> int:
    """Bytes of all pieces' packed values."""
    return sum((n * bits + 7) // 8 for n in lengths)
