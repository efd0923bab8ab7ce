"""The shared store of a node: a table of entries in memory, and their bytes in tiers: GPU memory, RAM and disk.

Processes of one node open the same files. The last one to arrive removes their names, so the kernel frees them when the
last process ends, however it ends. Entries are read and written by system calls, not through mapped memory: a full disk
or a shortened file is an error that is handled, never a signal.

A row of the table belongs to one sample and view, and keeps its place in a file. Its checksum covers the bytes and the
key (sample, view, level), so an entry that was damaged, or is being replaced by another process, is never used.
Entries in GPU memory have no checksum: comparing it would make the host wait for the GPU at each batch.
"""

import ctypes
import errno
import fcntl
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import SynclineWarning
from syncline.files import reason
from syncline.pipeline.cache.entry import checksums, mixed
from syncline.pipeline.cache.gpu_tier import GpuTier

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - names in it are random, and files are private
# Columns of the table.
LEVEL, VIEW, CHECKSUM, PLACE, USED = range(5)
# Fields of the header.
JOINED, ENTRY_BYTES, CLOCK, CURRENT, BOUNDARY, PREVIOUS, PREVIOUS_BOUNDARY = range(7)
SLOTS = {"device": 8, "ram": 9, "disk": 10}
USED_SLOTS = {"device": 11, "ram": 12, "disk": 13}
_FIRST = {"device": 1 << 50, "ram": 1, "disk": 1 << 40}
"""By tier, in the order in which they fill up, the number of its first place."""
_HEADER = 24
_COLUMNS = 5


@dataclass(frozen=True)
class Found:
    """Entries read for a batch. `current` and `previous` are rows of the batch; `entries` has their bytes in order."""

    current: Tensor
    previous: Tensor
    entries: Tensor
    damaged: int = 0

    def select(self, rows: Sequence[int], *, of: int) -> "Found":
        """What was found for some rows of a batch `of` so many; damage is counted with the first row."""
        at = torch.full((of,), -1, dtype=torch.int64, device="cpu")
        at[torch.cat((self.current, self.previous))] = torch.arange(len(self.entries), device="cpu")
        at = at[torch.tensor(rows, dtype=torch.int64, device="cpu")]
        current = ((at >= 0) & (at < len(self.current))).nonzero().squeeze(1)
        previous = (at >= len(self.current)).nonzero().squeeze(1)
        order = at[torch.cat((current, previous))]
        first = int(order[0]) if len(order) else 0
        consecutive = torch.equal(order, torch.arange(first, first + len(order), device="cpu"))
        entries = self.entries[first : first + len(order)] if consecutive else self.entries[order]
        return Found(current, previous, entries, self.damaged if 0 in rows else 0)

    @property
    def current_entries(self) -> Tensor:
        """The bytes of the entries at the current level."""
        return self.entries[: len(self.current)]

    @property
    def previous_entries(self) -> Tensor:
        """The bytes of the entries at the previous level."""
        return self.entries[len(self.current) :]


class Store:
    """Entries by (sample, view, level), in `ram` and `disk` bytes for all processes of the node together.

    Every live entry is read once per epoch, so replacing one by another gains nothing: entries go to the GPU if there
    is room for them, then to RAM, then to disk, then nowhere. What is evicted is dead: of an older level, or unused for
    two epochs.
    """

    def __init__(
        self, token: str, *, samples: int, views: int = 1, ram: int, disk: int = 0, folder: Path | None = None,
        memory: Path = SHARED_MEMORY, processes: int = 1, gpu: GpuTier | None = None,
    ) -> None:  # fmt: skip
        """`OSError` where the table does not fit into memory or the folder cannot be used."""
        self._rows, self._views, self._gpu = samples * views, views, gpu
        self._lock = threading.Lock()
        self._closed: set[str] = set()
        table_bytes = 8 * (_HEADER + self._rows * _COLUMNS)
        if table_bytes > ram:
            raise OSError(errno.ENOSPC, f"a table of {table_bytes} bytes is over the budget of {ram}")
        self._budget = {"device": 0 if gpu is None else gpu.bytes, "ram": ram - table_bytes, "disk": disk}
        names = [(memory, "table"), (memory, "ram"), (folder or Path(tempfile.gettempdir()), "disk")]
        self._paths = [place / f"syncline-cache-{token}.{name}" for place, name in names[: 3 if disk else 2]]
        self._files: list[int] = []
        try:
            for path in self._paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._files.append(os.open(path, flags, 0o600))
            with self._exclusively():
                # Reserved now: a page of a mapped file that cannot be filled later would end the process.
                os.posix_fallocate(self._files[0], 0, table_bytes)
                whole = torch.from_file(
                    f"/proc/self/fd/{self._files[0]}", shared=True, size=table_bytes // 8, dtype=torch.int64
                )
                self._header, self._table = whole[:_HEADER], whole[_HEADER:].view(self._rows, _COLUMNS)
                self._header[JOINED] += 1
                if gpu is not None:
                    gpu.join(self._paths[1].with_suffix(".gpu"), number=int(self._header[JOINED]) - 1, of=processes)
                if int(self._header[JOINED]) >= processes:
                    self._remove_names()
        except OSError:
            self.close()
            raise

    def set_level(self, level: int, boundary: int) -> tuple[int, int]:
        """The level that processes store from now on; returns the one before it, and its boundary.

        The first process that comes to a level makes the one before it the previous level. Entries of others are dead.
        """
        header = self._header
        with self._exclusively():
            if int(header[CURRENT]) != level:
                header[PREVIOUS], header[PREVIOUS_BOUNDARY] = header[CURRENT].clone(), header[BOUNDARY].clone()
                header[CURRENT], header[BOUNDARY] = level, boundary
            return int(header[PREVIOUS]), int(header[PREVIOUS_BOUNDARY])

    def read(
        self, samples: Tensor, view: int, current: int, previous: int, *, size: int, pinned: bool = False
    ) -> Found:
        """The entries of a batch, of `size` bytes, at the current level, or else at the previous one."""
        rows = self._row_of(samples, view)
        table = self._table[rows]
        usable = (table[:, VIEW] == view) & (table[:, PLACE] > 0) & (self._header[ENTRY_BYTES] == size)
        at = [((table[:, LEVEL] == level) & usable).nonzero().squeeze(1) for level in (current, previous)]
        if not previous:
            at[1] = at[1][:0]
        wanted = torch.cat(at)
        places, keys = table[wanted, PLACE], mixed(samples[wanted], view, table[wanted, LEVEL])
        entries, good = self._read_host(places, table[wanted, CHECKSUM], keys, size, pinned=pinned)
        if self._gpu is not None:
            entries = self._gpu.read(places - _FIRST["device"], entries)
        if len(rows):
            self._header[CLOCK] += len(rows)
            self._table[rows[wanted], USED] = self._header[CLOCK].clone()
        if bool(good.all()):
            return Found(at[0], at[1], entries)
        # A row that another process replaced meanwhile is not damaged.
        same = (self._table[rows[wanted]][:, [LEVEL, CHECKSUM]] == table[wanted][:, [LEVEL, CHECKSUM]]).all(1)
        damaged = ~good & same
        self._table[rows[wanted[damaged]], LEVEL] = 0
        current_good, previous_good = good[: len(at[0])], good[len(at[0]) :]
        return Found(at[0][current_good], at[1][previous_good], entries[good], int(damaged.sum()))

    def _read_host(
        self, places: Tensor, sums: Tensor, keys: Tensor, size: int, *, pinned: bool
    ) -> tuple[Tensor, Tensor]:
        """Entries from RAM and disk, and which of them are whole; rows of entries on the GPU are not filled."""
        entries = torch.empty(len(places), size, dtype=torch.uint8, device="cpu", pin_memory=pinned and len(places) > 0)
        on_gpu = places >= _FIRST["device"]
        if bool(on_gpu.all()):
            return entries, on_gpu
        here = (~on_gpu).nonzero().squeeze(1)
        read = [self._read_entry(int(places[row]), entries[row]) for row in here]
        on_gpu[here] = torch.tensor(read, dtype=torch.bool, device="cpu")
        filled = entries if len(here) == len(places) else entries[here]
        on_gpu[here] &= checksums(filled, keys[here]) == sums[here]
        return entries, on_gpu

    def write(self, samples: Tensor, view: int, level: int, entries: Tensor) -> int:
        """Store entries, as many as there is room for; returns their number. A full tier is closed with a warning."""
        rows = self._row_of(samples, view)
        places = self._places(rows, entries.shape[1])
        self._table[rows, LEVEL] = 0  # a reader must not take old keys with new bytes for damage
        done = places >= _FIRST["device"]
        if self._gpu is not None and bool(done.any()):
            self._gpu.write(places[done] - _FIRST["device"], entries[done.to(entries.device)])
        sums = torch.zeros_like(places)
        here = ((places > 0) & ~done).nonzero().squeeze(1)
        if len(here):
            content = entries[here.to(entries.device)].cpu()
            sums[here] = checksums(content, mixed(samples[here], view, level))
            pairs = zip(places[here].tolist(), content, strict=True)
            done[here] = torch.tensor([self._write_entry(*pair) for pair in pairs], dtype=torch.bool, device="cpu")
        self._table[rows[~done], PLACE] = 0
        self._table[rows[done], VIEW] = view
        self._table[rows[done], CHECKSUM] = sums[done]
        self._table[rows[done], LEVEL] = level
        return int(done.sum())

    def has_other_views(self, samples: Tensor, view: int, level: int) -> bool:
        """Whether all rows of these samples have entries of this level in other views, which `write` would replace."""
        table = self._table[self._row_of(samples, view)]
        return bool(((table[:, LEVEL] == level) & (table[:, VIEW] != view)).all())

    def drop(self, samples: Tensor, view: int) -> None:
        """Forget the entries of these samples."""
        self._table[self._row_of(samples, view), LEVEL] = 0

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes in use by tier, in RAM with the table."""
        size = int(self._header[ENTRY_BYTES])
        used = {tier: int(self._header[field]) * size for tier, field in USED_SLOTS.items()}
        return used | {"ram": used["ram"] + self._header.nbytes + self._table.nbytes}

    @property
    def file_descriptors(self) -> tuple[int, ...]:
        """The open files: table, RAM and disk."""
        return tuple(self._files)

    def close(self) -> None:
        """Close the files; they vanish with the last process that closes them."""
        self._remove_names()
        if self._gpu is not None:
            self._gpu.close()
        while self._files:
            os.close(self._files.pop())

    def _row_of(self, samples: Tensor, view: int) -> Tensor:
        return samples * self._views + view % self._views

    def _places(self, rows: Tensor, size: int) -> Tensor:
        """The place of each row: the one it has, a new one, or that of a dead row; 0 where there is none."""
        with self._exclusively():
            if int(self._header[ENTRY_BYTES]) != size:
                self._start_again(size)
            places = self._table[rows, PLACE]
            without = (places == 0).nonzero().squeeze(1)
            if len(without):
                given = self._unused_places(len(without))
                if len(given) < len(without):
                    given = torch.cat((given, self._places_of_dead(len(without) - len(given), rows)))
                places[without[: len(given)]] = given
                self._table[rows, PLACE] = places
            self._table[rows, USED] = self._header[CLOCK].clone()
        return places

    def _start_again(self, size: int) -> None:
        """Empty the table for entries of another size."""
        self._table.zero_()
        self._header[ENTRY_BYTES] = size
        for tier, budget in self._budget.items():
            self._header[SLOTS[tier]], self._header[USED_SLOTS[tier]] = budget // size, 0
        for file in self._files[1:]:
            os.ftruncate(file, 0)

    def _unused_places(self, count: int) -> Tensor:
        """New places, in the fastest tier that has room."""
        found: list[int] = []
        for tier, first in _FIRST.items():
            begin = int(self._header[USED_SLOTS[tier]])
            take = max(0, min(count - len(found), int(self._header[SLOTS[tier]]) - begin))
            found += range(first + begin, first + begin + take)
            self._header[USED_SLOTS[tier]] += take
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def _places_of_dead(self, count: int, keep: Tensor) -> Tensor:
        """The places of rows that will not be read again; they lose them."""
        table = self._table
        live = (table[:, LEVEL] == self._header[CURRENT]) | (table[:, LEVEL] == self._header[PREVIOUS])
        unused = table[:, USED] < self._header[CLOCK] - 2 * self._rows
        dead = ((table[:, PLACE] > 0) & (~live | unused)).clone()
        dead[keep] = False
        rows = dead.nonzero().squeeze(1)[:count]
        places = table[rows, PLACE]
        table[rows, LEVEL] = 0
        table[rows, PLACE] = 0
        return places

    def _read_entry(self, place: int, entry: Tensor) -> bool:
        file, offset = self._locate(place, entry.nbytes)
        try:
            return os.preadv(file, [_memory(entry)], offset) == entry.nbytes
        except OSError:  # a disk that cannot be read: the entry is computed again
            return False

    def _write_entry(self, place: int, entry: Tensor) -> bool:
        file, offset = self._locate(place, entry.nbytes)
        try:
            if os.pwrite(file, _memory(entry), offset) == entry.nbytes:
                return True
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as caught:
            error = caught
        self._close_tier(place, error)
        return False

    def _close_tier(self, place: int, error: OSError) -> None:
        """Give out no more places of a tier that cannot be written."""
        tier = "ram" if place < _FIRST["disk"] else "disk"
        self._header[SLOTS[tier]] = 0
        if tier not in self._closed:
            self._closed.add(tier)
            where = self._paths[1 if tier == "ram" else 2].parent
            text = f"activation cache: {where} takes no more entries ({reason(error)}); what is not stored is computed"
            warnings.warn(text, SynclineWarning, stacklevel=2)

    def _locate(self, place: int, size: int) -> tuple[int, int]:
        tier = "ram" if place < _FIRST["disk"] else "disk"
        return self._files[1 if tier == "ram" else 2], (place - _FIRST[tier]) * size

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One process and one thread at a time; the kernel releases the lock of a process that dies."""
        with self._lock:
            fcntl.flock(self._files[0], fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._files[0], fcntl.LOCK_UN)

    def _remove_names(self) -> None:
        for path in (*self._paths, self._paths[1].with_suffix(".gpu")):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _memory(entry: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU (`Tensor.numpy` would need numpy)."""
    return memoryview((ctypes.c_ubyte * entry.nbytes).from_address(entry.data_ptr()))
