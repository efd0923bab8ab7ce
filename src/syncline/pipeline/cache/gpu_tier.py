"""The tier of the activation cache in GPU memory: one allocation that the processes on a GPU share (CUDA IPC)."""

import json
from pathlib import Path

import torch
from torch import Tensor

from syncline._compat.tensors import export_cuda_memory, open_cuda_memory
from syncline.files import read_json, write_text


class GpuTier:
    """Entries in `bytes` of one GPU's memory. The first process to join allocates them, the others open them."""

    def __init__(self, device: torch.device, *, bytes: int) -> None:
        self.device, self.bytes = device, bytes
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def join(self, path: Path, *, number: int, of: int) -> None:
        """Called by one process at a time, `number` of them before; `path` carries the handles from the first one."""
        try:
            if not number:
                self._memory = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
                write_text(json.dumps([export_cuda_memory(self._memory) for _ in range(1, of)]), path)
            else:
                self._memory = open_cuda_memory(read_json(path)[number - 1])[: self.bytes]
        except RuntimeError as error:  # torch's type for all errors of CUDA
            raise OSError(str(error).splitlines()[0]) from error

    def read(self, slots: Tensor, entries: Tensor) -> Tensor:
        """The entries on the GPU; those whose slot is negative are copied from `entries`."""
        moved = entries.to(self.device, non_blocking=True)
        here = (slots >= 0).nonzero().squeeze(1)
        if len(here):
            chosen = self._slab(entries.shape[1]).index_select(0, slots[here].to(self.device))
            moved = chosen if len(here) == len(slots) else moved.index_copy(0, here.to(self.device), chosen)
        return moved

    def write(self, slots: Tensor, entries: Tensor) -> None:
        """Copy entries into their slots; returns when other processes may read them."""
        self._slab(entries.shape[1]).index_copy_(0, slots.to(self.device), entries.to(self.device))
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give up the memory; it is freed when the process that allocated it does so."""
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _slab(self, size: int) -> Tensor:
        return self._memory[: self.bytes // size * size].view(-1, size)
