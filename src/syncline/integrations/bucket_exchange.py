"""The way of gradients that somebody else has put into buckets: own process groups, and futures of what arrives.

Buckets come one by one, in the same order on every rank, and are launched in that order; how many a pass has is known
when the last has come. Otherwise the executors are the engine's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from syncline import codecs, exchange
from syncline.engine.executors.streams import Streams
from syncline.engine.executors.threads import Threads
from syncline.engine.health.errors import PeerMonitor
from syncline.engine.launch.batches import cells_of, rounds_of
from syncline.engine.launch.units import UnitRun
from syncline.engine.process_groups import Groups, parent_group, timeout_of
from syncline.errors import UsageError
from syncline.trace.record.recorder import Recorder, process_recorder


class _Threads(Threads):
    """Worker threads that get launches one by one, and set a future when one is done."""

    def __init__(self, recorder: Recorder, *, watched: PeerMonitor, cut: Callable[[], None]) -> None:
        self._futures: set[Future[Tensor]] = set()
        super().__init__(recorder, watched=watched, cut=cut)

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        unit.exchanged = self.promise()
        future: Future[Tensor] = Future()
        with self._changed:
            self._raise()
            self._futures.add(future)
            self.after(unit, lambda: self._deliver(future, buffer))
            for launch in unit.launches:
                launch.position, launch.ready = len(self._order), True
                self._order.append(launch)
                self._turns += [0] * (launch.rounds - len(self._turns))
            for number in range(len(self._turns)):
                self._pass(number)
        # An exception reaches those who wait in C++ by way of a callback that raises it.
        return future.then(lambda f: f.value())

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        with self._changed:
            left, self._futures = self._futures, set()
        failure = self.failure if isinstance(self.failure, Exception) else RuntimeError(repr(self.failure))
        for future in left:
            future.set_exception(failure)  # type: ignore[arg-type]

    def _deliver(self, future: "Future[Tensor]", buffer: Tensor) -> None:
        with self._changed:
            mine = future in self._futures
            self._futures.discard(future)
        if mine:
            future.set_result(buffer)


class _Streams(Streams):
    """Side streams that get launches one by one; the future's waiters are ordered behind them."""

    def __init__(self, recorder: Recorder, device: torch.device, *, watched: PeerMonitor) -> None:
        super().__init__(recorder, device, watched=watched)
        self._delivery = torch.cuda.Stream(device, priority=-1)

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        self._raise()
        unit.exchanged = self.promise()
        for launch in unit.launches:
            launch.position = len(self._order)
            self._order.append(launch)
        self.ready(unit)
        future: Future[Tensor] = Future(devices=[self.device])
        with torch.cuda.stream(self._delivery):
            self._delivery.wait_event(unit.exchanged.event)
            future.set_result(buffer)
        return future


class BucketWire:
    """Process groups, links and the executor of one model's buckets; `step` counts backward passes."""

    def __init__(self, spec: str, *, carrier: str | None, process_group: Any, seed: int) -> None:
        self.codec = codecs.build(spec)
        self.carrier = str(exchange.check(self.codec, carrier or exchange.legal(self.codec)[0]))
        parent = parent_group(process_group)
        self.groups = Groups(parent, timeout_of(parent, None))
        self.seed, self.step = seed, 0
        self.rank, self.world = self.groups.rank, self.groups.world
        self.links: dict[str, list[exchange.Link]] = {self.carrier: []}
        self._executor: Any = None
        self._closed = self.world == 1
        if self._closed:
            return
        if exchange.build(self.carrier).workers(self.world) != self.world:
            raise UsageError(f"exchange '{self.carrier}' needs ranks that do not train, and all ranks of DDP do: use"
                             f" {', '.join(n for n in exchange.legal(self.codec) if n != 'server')}")  # fmt: skip
        usual = cells_of(self.codec, ("matrix", "vector"), ((64, 64), (64,)), 1)
        self.open(rounds_of(usual[0])[0])
        self.groups.agree(f"{self.codec} {self.carrier} {seed}", "the hooks' settings")
        self._watched = PeerMonitor(self)

    def open(self, rounds: int) -> None:
        """Have links for so many rounds; all ranks ask alike."""
        self.groups.open(rounds)
        links = self.links[self.carrier]
        links += [exchange.connect(self.carrier, group) for group in self.groups.rounds[len(links) :]]

    def fail(self, error: BaseException) -> None:
        """Stop all that is in flight with this error."""
        if self._executor is not None:
            self._executor.fail(error)

    def begin(self, device: torch.device) -> None:
        """A backward pass starts."""
        if self._closed:
            raise UsageError("this hook's state is closed: register a new syncline.ddp_hook on a new DDP model")
        if self._executor is None:
            recorder = process_recorder(device)
            cuda = device.type == "cuda"
            self._executor = (
                _Streams(recorder, device, watched=self._watched)
                if cuda
                else _Threads(recorder, watched=self._watched, cut=self.groups.cut)
            )
        self._watched.doing = f"step {self.step}: backward"
        self._executor.begin([])

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        """Launch a bucket behind those before it; the future is of `buffer`, filled with averaged gradients."""
        future: Future[Tensor] = self._executor.send(unit, buffer)
        return future

    def close(self, *, reuse: bool = True) -> None:
        """End all threads; `reuse` leaves the process groups to the next engine, on every rank."""
        if self._closed:
            return
        self._closed = True
        self._watched.close()
        failed = False
        if self._executor is not None:
            self._executor.close()
            self._executor.recorder.engines -= 1
            failed = self._executor.failure is not None
        if reuse and not failed:
            self.groups.close()
