"""`ActivationCache`: the activations behind the frozen layers of a model, read instead of computed where that pays."""

import math
import random
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.errors import SynclineWarning, UsageError
from syncline.files import reason
from syncline.pipeline.cache.determinism import find_randomness
from syncline.pipeline.cache.entry import (
    Layout,
    State,
    assemble,
    digest,
    equal_bits,
    nearly_equal,
    select,
    tensors_of,
)
from syncline.pipeline.cache.gpu_tier import GpuTier
from syncline.pipeline.cache.prefetch import Prefetcher
from syncline.pipeline.cache.stats import CacheStats, Payoff
from syncline.pipeline.cache.store import Found, Store
from syncline.stats import median

_MOST_WRONG = 3
"""Wrong values after which the cache is switched off."""
_READ_BACK = 3
"""Batches at a new boundary that are read again at once, to measure a hit."""


class ActivationCache:
    """Computes the first `boundary` layers of a model without gradients, and keeps their output by sample and view.

    `layers` are called in order, each with the output of the one before it: a tensor, or a tuple as arguments. An entry
    belongs to (sample, view, boundary, weights of the frozen layers). `view` is the number of the random augmentation
    that a sample's input has (0 where the input of a sample never changes): other views never share an entry.
    When the boundary moves up, the entries of the old one are the input for the layers in between.

    The cache never changes results. It switches itself off (`why_off`) where the layers are random, where reading is
    not faster than computing, where views do not repeat, or where files cannot be used. A share `check` of the batches
    that were read is computed again and compared. No method waits for another rank.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, samples: int, ram: int, disk: int = 0, folder: Path | None = None,
        gpu: int = 0, views: int = 1, check: float = 0.01, epochs: float = 10.0, token: str = "", processes: int = 1,
        must_pay: bool = True, timing: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`ram` and `disk` are bytes for the whole node; `folder` holds the disk tier (default: the temporary folder).

        `gpu` are bytes on the GPU of the layers, for all processes on it together; all of them must use the same one.
        `token` is the same in all `processes` that share the entries (see `shared_cache`). `epochs` is the expected
        number of reads of an entry. `must_pay=False` keeps the cache on where it is slower than computing.
        """
        if samples < 1 or views < 1 or not 0 <= check <= 1:
            raise UsageError(
                f"an activation cache needs samples and views of 1 or more and a check share from 0 to 1, not"
                f" {samples=}, {views=}, {check=}"
            )
        self.boundary = 0
        self.stats = CacheStats()
        self.why_off = ""
        self._layers, self._samples = list(layers), samples
        self.epochs = epochs
        """How many more epochs will read an entry. Set it when some have passed: a cache must pay for its writes."""
        self._check, self._must_pay, self._clock = check, must_pay, timing
        self._random = random.Random(token)  # of its own: the job's random numbers stay as they are
        self._level = self._previous = self._from = 0
        self._settled, self._mode = False, _autocast()
        self._seconds_before = 0.0
        self._pinned = False
        self._layout: Layout | None = None
        self._fresh = True
        self._payoff = Payoff()
        self._ahead = Prefetcher()
        self._store: Store | None = None
        device = next((tensor.device for tensor in _tensors(self._layers)), torch.device("cpu"))
        self._on_gpu = device.type == "cuda" and gpu > 0
        try:
            self._store = Store(
                token or secrets.token_hex(8), samples=samples, views=views, ram=ram, disk=disk, folder=folder,
                processes=processes, gpu=GpuTier(device, bytes=gpu) if self._on_gpu else None,
            )  # fmt: skip
        except OSError as error:
            self._switch_off(f"its files cannot be created: {reason(error)}", failed=True)

    def move(self, layers: int, *, epochs: float | None = None) -> None:
        """The first `layers` layers are frozen from now on; `epochs`: how many more epochs will read them."""
        if not 0 <= layers <= len(self._layers):
            raise UsageError(f"the boundary {layers} is not one of 0 to {len(self._layers)} layers")
        if self.why_off and self._store is not None:
            self.why_off = ""  # more layers cost more to compute: the cache may pay now
        self.epochs = self.epochs if epochs is None else epochs
        self.boundary, self._settled = layers, False
        self._ahead.clear()

    @torch.no_grad()
    def __call__(self, ids: Tensor, inputs: State, view: int = 0) -> State:
        """The activations of the samples `ids` at the boundary, on the device of `inputs`."""
        if not self.boundary:
            return inputs
        if self.why_off or self._store is None:
            return self._compute(inputs, 0)
        self._settle()
        samples = self._known(ids)
        layout, device = self._layout, tensors_of(inputs)[0].device
        self._pinned = device.type == "cuda"
        began = self._now(device)
        found = self._found(samples, view) if layout is not None else _NOTHING
        pieces: list[tuple[Tensor, State]] = []
        if len(found.current) and layout is not None:
            pieces.append((found.current, layout.unpack(found.current_entries, device)))
            if len(found.current) == len(samples):
                self._payoff.read.append((self._now(device) - began) / len(samples))
        if len(found.previous) and layout is not None:
            state = layout.unpack(found.previous_entries, device)
            pieces.append((found.previous, self._compute_and_keep(samples[found.previous], state, view, self._from)))
        known = torch.zeros(len(samples), dtype=torch.bool, device="cpu")
        known[found.current] = known[found.previous] = True
        missing = (~known).nonzero().squeeze(1)
        if len(missing):
            state = inputs if len(missing) == len(samples) else select(inputs, missing)
            pieces.append((missing, self._compute_and_keep(samples[missing], state, view, 0)))
        self._count(found, len(missing))
        result = assemble(pieces, len(samples))
        if len(found.current) and self._random.random() < self._check:
            result = self._checked(samples, inputs, view, result, found.current)
        self._decide(stores=len(missing) > 0)
        return result

    @property
    def read_s(self) -> float | None:
        """Seconds to read a sample, 0 while that is not known; None if the cache is off for good."""
        if self._store is None:
            return None
        return median(list(self._payoff.read)) if self._payoff.read else 0.0

    def prefetch(self, samples: Tensor, view: int = 0) -> None:
        """Read the entries of a coming batch in the background."""
        if self._on_gpu or not self._settled:
            return  # on a GPU entries are where they are needed
        if self._store is not None and self._layout is not None and self._level and not self.why_off:
            samples = self._known(samples)
            read = partial(self._read, samples, view, self._layout.bytes)
            self._ahead.announce((self._level, view), samples, read)

    @property
    def files(self) -> tuple[int, ...]:
        """Descriptors of the open files: table, RAM tier and, if there is one, disk tier."""
        return () if self._store is None else self._store.file_descriptors

    def close(self) -> None:
        """End the reading thread and remove the files."""
        self._ahead.close()
        if self._store is not None:
            self._note_bytes()
            self._store.close()
            self._store = None
            self.why_off = self.why_off or "it is closed"

    def _settle(self) -> None:
        """Find the level of the boundary and the one before it; again if autocast was switched since."""
        mode = _autocast()
        if self._settled and mode == self._mode:
            return
        self._settled, self._mode = True, mode
        level = self._level_at(self.boundary)
        if level == self._level:
            return
        computed = median(list(self._payoff.compute)) if self._payoff.compute else 0.0
        self._level, self._fresh, self._payoff = level, True, Payoff()
        self._previous = self._from = 0
        self._ahead.clear()
        if self._store is not None and level:
            previous, place = self._store.set_level(level, self.boundary)
            # Only where the old entries were made with the weights that these layers have now.
            if 0 < place <= self.boundary and self._level_at(place) == previous:
                self._previous, self._from, self._seconds_before = previous, place, computed

    def _level_at(self, boundary: int) -> int:
        """The key of the activations behind the first `boundary` layers, by the content of their weights."""
        return digest(_tensors(self._layers[:boundary]), boundary, self._mode) if boundary else 0

    def _known(self, samples: Tensor) -> Tensor:
        samples = samples.to("cpu", torch.int64)
        if len(samples) and not 0 <= int(samples.min()) <= int(samples.max()) < self._samples:
            raise UsageError(f"the cache knows the samples 0 to {self._samples - 1}: give samples= the data's length")
        return samples

    def _found(self, samples: Tensor, view: int) -> Found:
        assert self._layout is not None
        found = self._ahead.take((self._level, view), samples)
        if found is None:
            return self._read(samples, view, self._layout.bytes)
        self.stats.prefetched += len(found.current)
        return found

    def _read(self, samples: Tensor, view: int, size: int) -> Found:
        assert self._store is not None
        return self._store.read(samples, view, self._level, self._previous, size=size, pinned=self._pinned)

    def _compute(self, state: State, first: int) -> State:
        for layer in self._layers[first : self.boundary]:
            state = layer(*tensors_of(state))
        return state

    def _compute_and_keep(self, samples: Tensor, state: State, view: int, first: int) -> State:
        """The activations at the boundary from those behind the first `first` layers, which are stored."""
        device = tensors_of(state)[0].device
        began = self._now(device)
        result = self._compute(state, first)
        seconds = (self._now(device) - began) / len(samples)
        self._payoff.compute.append(seconds + (self._seconds_before if first else 0.0))
        if self._fresh:
            self._fresh = False
            layers = self._layers[first : self.boundary]
            if why := find_randomness(layers, lambda given: self._compute(given, first), state, result):
                self._switch_off(why, failed=True)
        self._keep(samples, view, result)
        return result

    def _keep(self, samples: Tensor, view: int, state: State) -> None:
        """Store the activations of a batch; the first batches are read back, which measures a hit."""
        if self._store is None or self.why_off:
            return
        try:
            layout = Layout.of(state)
        except ValueError as error:
            self._switch_off(f"{error}: the batch must be the first dimension of each", failed=True)
            return
        if self._layout is not None and layout != self._layout and len(self._payoff.store):
            return  # a batch of another shape, such as longer texts: computed each time
        if self._must_pay and self._store.has_other_views(samples, view, self._level):
            self._switch_off("the views of samples do not repeat, so nothing that is stored is read", failed=False)
            return
        self._layout = layout
        began = self._clock()
        stored = self._store.write(samples, view, self._level, layout.pack(state))
        self._payoff.store.append((self._clock() - began) / len(samples))
        self.stats.stored += stored
        self._note_bytes()
        if stored == len(samples) and len(self._payoff.read) < len(self._payoff.compute) <= _READ_BACK:
            device = tensors_of(state)[0].device
            began = self._now(device)
            found = self._read(samples, view, layout.bytes)
            layout.unpack(found.entries, device)
            self._payoff.read.append((self._now(device) - began) / len(samples))

    def _checked(self, samples: Tensor, inputs: State, view: int, result: State, hits: Tensor) -> State:
        """Compute a batch that was read again; where both differ, its own values are used and the entries dropped."""
        assert self._store is not None
        expected = self._compute(inputs, 0)
        self.stats.checked += len(hits)
        if equal_bits(result, expected):
            return result
        if nearly_equal(result, expected):
            self.stats.rounded += len(hits)
            return result
        self.stats.wrong += 1
        self._store.drop(samples[hits], view)
        text = f"activation cache: a batch that was read differs from the computed one at layer {self.boundary}"
        if self.stats.wrong >= _MOST_WRONG:
            self._switch_off(f"{self.stats.wrong} batches that were read differ from the computed ones", failed=True)
        else:
            warnings.warn(f"{text}; the computed one is used", SynclineWarning, stacklevel=3)
        return expected

    def _count(self, found: Found, missing: int) -> None:
        self.stats.hits += len(found.current)
        self.stats.continued += len(found.previous)
        self.stats.misses += missing
        self.stats.damaged += found.damaged

    def _note_bytes(self) -> None:
        if self._store is not None:
            used = self._store.used_bytes
            self.stats.gpu_bytes, self.stats.ram_bytes, self.stats.disk_bytes = (
                used[tier] for tier in ("device", "ram", "disk")
            )

    def _decide(self, *, stores: bool) -> None:
        """Switch off where it does not pay. Where everything is stored, what that has cost does not count any more."""
        if not self._must_pay or self.why_off or not self._payoff.known():
            return
        if why := self._payoff.why_not(epochs_left=self.epochs if stores else math.inf):
            self._switch_off(why, failed=False)

    def _switch_off(self, why: str, *, failed: bool) -> None:
        """Compute everything from now on; a failure is a warning, a cache that does not pay is not."""
        self.why_off = why
        self._ahead.clear()
        if failed:
            warnings.warn(f"the activation cache is off: {why}", SynclineWarning, stacklevel=3)

    def _now(self, device: torch.device) -> float:
        """The clock, with the device's work done while the decision is open."""
        if device.type == "cuda" and not self._payoff.known():
            torch.cuda.synchronize(device)
        return self._clock()


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
_NOTHING = Found(_NONE, _NONE, torch.empty(0, 0, dtype=torch.uint8, device="cpu"))


def shared_cache(
    layers: Sequence[nn.Module], *, group: dist.ProcessGroup | None = None, node: int | None = None, **options: Any
) -> ActivationCache:
    """An `ActivationCache` that the ranks of each node share; call it on every rank of `group`.

    `node` separates emulated nodes of one machine; without it, ranks with the same host name share.
    """
    if not dist.is_initialized():
        return ActivationCache(layers, **options)
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = digest((), socket.gethostname(), node)
    gpu = next((tensor.device for tensor in _tensors(layers) if tensor.is_cuda), None)
    card = 0 if gpu is None else digest((), str(torch.cuda.get_device_properties(gpu).uuid))
    facts = torch.tensor([mine, secrets.randbits(62), card], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(facts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, facts, group=group)
    neighbours = [other for other in torch.stack(everyone).tolist() if other[0] == mine]
    token = f"{mine:x}-{neighbours[0][1]:x}"  # random: a leftover of another run cannot have this name
    if len({other[2] for other in neighbours}) > 1:
        options["gpu"] = 0  # several GPUs: their ranks share what is in RAM
    return ActivationCache(layers, token=token, processes=len(neighbours), **options)


def _tensors(layers: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]


def _autocast() -> tuple[tuple[str, bool, str], ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")
    )
