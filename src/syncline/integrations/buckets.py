"""Exchange of gradient buckets that come one by one in the same order on every rank: for DDP's hook and FSDP2."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

from syncline import codecs
from syncline import exchange as exchanges
from syncline.engine.executors.streams import StreamExecutor
from syncline.engine.executors.threads import ThreadExecutor
from syncline.engine.health.peer_errors import PeerMonitor
from syncline.engine.launch.batches import count_rounds, launch_batches
from syncline.engine.launch.units import StepContext, UnitRun
from syncline.engine.node_layout import required_ranks_per_node
from syncline.engine.process_groups import GroupLike, Groups, parent_group, timeout_of
from syncline.errors import UsageError
from syncline.plan.auto_spec import parse_auto
from syncline.trace.record.recorder import Recorder, process_recorder


class BucketThreads(ThreadExecutor):
    """Worker threads that get buckets one by one, and set a future when one is done."""

    def __init__(self, recorder: Recorder, *, peers: PeerMonitor, cut: Callable[[], None]) -> None:
        self._futures: set[Future[Tensor]] = set()
        """Futures without a result; guarded by `_futures_lock`."""
        self._futures_lock = threading.Lock()
        super().__init__(recorder, peers=peers, cut=cut)

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        future: Future[Tensor] = Future()
        with self._futures_lock:
            self._futures.add(future)  # first: `fail` of another thread then finds it
        try:
            self.append(unit)
        except BaseException:
            self._take(future)
            raise
        self.after(unit, lambda: self._deliver(future, buffer))
        # An exception reaches waiters in C++ only through a callback that raises it.
        return future.then(lambda f: f.value())

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        with self._futures_lock:
            left, self._futures = self._futures, set()
        failure = self.failure if isinstance(self.failure, Exception) else RuntimeError(repr(self.failure))
        for future in left:
            future.set_exception(failure)  # type: ignore[arg-type]

    def _take(self, future: "Future[Tensor]") -> bool:
        """Remove a future; False if `fail` has taken it already."""
        with self._futures_lock:
            mine = future in self._futures
            self._futures.discard(future)
        return mine

    def _deliver(self, future: "Future[Tensor]", buffer: Tensor) -> None:
        if self._take(future):
            future.set_result(buffer)


class BucketStreams(StreamExecutor):
    """Side streams that get buckets one by one; waiters of the future are ordered behind them."""

    def __init__(self, recorder: Recorder, device: torch.device, *, peers: PeerMonitor) -> None:
        super().__init__(recorder, device, peers=peers, captures=None)
        self._delivery = torch.cuda.Stream(device, priority=-1)

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        self.append(unit)
        exchanged = self.exchanged(unit)
        assert exchanged is not None
        future: Future[Tensor] = Future(devices=[self.device])
        with torch.cuda.stream(self._delivery):
            self._delivery.wait_event(exchanged.event)
            future.set_result(buffer)
        return future


class BucketExchange:
    """Process groups, links and the executor for one model's buckets; `step` counts backward passes."""

    def __init__(
        self, spec: str, *, pattern: str | None, process_group: GroupLike, seed: int, caller: str
    ) -> None:  # fmt: skip
        """`caller`: the function that the user called, for messages."""
        if parse_auto(spec) is not None:
            raise UsageError(f"{caller} cannot choose codecs: name one, such as 'powersgd(rank=4)', or use attach")
        self.codec = codecs.build(spec)
        self.pattern = str(exchanges.check(self.codec, pattern or exchanges.legal(self.codec)[0]))
        parent = parent_group(process_group, caller=caller)
        self._caller = caller
        self.groups = Groups(parent, timeout_of(parent, None))
        self.seed, self.step = seed, 0
        self.rank, self.world = self.groups.rank, self.groups.world
        self.links: dict[str, list[exchanges.Link]] = {self.pattern: []}
        self._executor: BucketThreads | BucketStreams | None = None
        self._closed = self.world == 1
        if self._closed:
            return
        if exchanges.build(self.pattern).workers(self.world) != self.world:
            raise UsageError(f"exchange '{self.pattern}' needs ranks that do not train, and all ranks train here: use"
                             f" {', '.join(exchanges.legal(self.codec))}")  # fmt: skip
        if exchanges.resolved(self.pattern, node=1) != self.pattern:
            self.groups.open(0)
            node = required_ranks_per_node(self.groups, self.pattern)
            self.pattern = exchanges.resolved(self.pattern, node=node)
            self.links = {self.pattern: []}
        usual = launch_batches(self.codec, ("matrix", "vector"), ((64, 64), (64,)), 1)
        self.open(count_rounds(usual[0])[0])
        self.groups.agree(f"{self.codec} {self.pattern} {seed}", f"the settings of {caller}")
        self._peers = PeerMonitor(self)

    def open(self, rounds: int) -> None:
        """Have links for this many rounds; all ranks call this alike."""
        self.groups.open(rounds)
        links = self.links[self.pattern]
        links += [exchanges.connect(self.pattern, group) for group in self.groups.rounds[len(links) :]]

    def fail(self, error: BaseException) -> None:
        """Stop all that is in flight with this error."""
        if self._executor is not None:
            self._executor.fail(error)

    def begin(self, device: torch.device) -> None:
        """A backward pass starts."""
        if self._closed:
            raise UsageError(f"what {self._caller} gave you is closed: call {self._caller} again on a new model")
        if self._executor is None:
            recorder = process_recorder(device, group=self.groups.label)
            if device.type == "cuda":
                self._executor = BucketStreams(recorder, device, peers=self._peers)
            else:
                self._executor = BucketThreads(recorder, peers=self._peers, cut=self.groups.cut)
        self._peers.doing = f"step {self.step}: backward"
        self._executor.begin([])

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        """Launch a bucket behind those before it; the future gives `buffer`, filled with averaged gradients."""
        assert self._executor is not None
        self._set_context(unit)
        return self._executor.send(unit, buffer)

    def launch(self, unit: UnitRun) -> None:
        """Launch a bucket behind those before it; `wait` returns when its gradients are averaged in place."""
        assert self._executor is not None
        self._set_context(unit)
        self._executor.append(unit)

    def _set_context(self, unit: UnitRun) -> None:
        for launch in unit.launches:
            launch.context = StepContext(self.step, self.rank, self.world, self.seed)

    def wait(self, unit: UnitRun) -> None:
        """Return when a bucket that was sent in this pass is averaged."""
        exchanged = None if self._executor is None else self._executor.exchanged(unit)
        assert exchanged is not None
        exchanged.wait()

    def close(self, *, reuse_groups: bool = True) -> None:
        """End all threads; `reuse_groups`: the next engine may use the process groups, on every rank."""
        if self._closed:
            return
        self._closed = True
        self._peers.close()
        failed = False
        if self._executor is not None:
            self._executor.close()
            self._executor.recorder.engines -= 1
            failed = self._executor.failure is not None
        if reuse_groups and not failed:
            self.groups.close()
