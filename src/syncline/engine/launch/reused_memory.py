"""Memory that launches use again on a CPU: residuals and products come and go in every step.

New memory is slow there: the first write to each page takes several times longer than a codec's work on it.
"""

import threading
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from syncline._compat.tensors import storage_address, storage_users


class ReusedMemory:
    """Gives out tensors on the CPU. Their memory is used again as soon as nobody has the tensor, or a view of it.

    From any thread: all state is guarded by the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, list[Tensor]] = {}
        """By size and dtype: memory of tensors that are kept from step to step."""
        self._passing: dict[torch.dtype, list[Tensor]] = {}
        """By dtype: memory of tensors that are soon dropped. It serves smaller ones, too."""
        self._addresses: set[int] = set()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, passing: bool = False) -> Tensor:
        """A tensor without values; `passing`: it will be dropped within the launch."""
        count = torch.Size(shape).numel()
        with self._lock:
            memory = self._of_passing(count, dtype) if passing else self._of_kept(count, dtype)
            return memory[:count].view(shape)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory was given out here."""
        return storage_address(tensor) in self._addresses

    def clear(self) -> None:
        """Forget all memory: other launches come, of other sizes."""
        with self._lock:
            self._kept, self._passing, self._addresses = {}, {}, set()

    def _of_kept(self, count: int, dtype: torch.dtype) -> Tensor:
        known = self._kept.setdefault((count, dtype), [])
        free = (one for one in known if storage_users(one) == 1)
        found = next(free, None)
        return self._new(known, count, dtype) if found is None else found

    def _of_passing(self, count: int, dtype: torch.dtype) -> Tensor:
        known = self._passing.setdefault(dtype, [])
        free = [place for place, one in enumerate(known) if storage_users(one) == 1]
        large = next((place for place in free if known[place].numel() >= count), None)
        if large is not None:
            return known[large]
        if free:  # a larger one takes its place
            self._addresses.discard(storage_address(known.pop(free[0])))
        return self._new(known, count, dtype)

    def _new(self, known: list[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        known.append(torch.empty(count, dtype=dtype))
        self._addresses.add(storage_address(known[-1]))
        return known[-1]
