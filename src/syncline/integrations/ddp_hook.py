"""`ddp_hook`: a communication hook for torch's DistributedDataParallel with our codecs and exchanges.

Codec state belongs to parameters, whatever bucket they are in. DDP tells a hook only when a bucket is ready. So a pass
whose last bucket has come counts as a step. The codec states that it left are kept when the next pass begins or
somebody asks for them; a pass that broke off leaves none. Buckets come one by one, in the same order on every rank, and
are launched in that order.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from syncline import codecs
from syncline import exchange as exchanges
from syncline._compat import GradBucket
from syncline.engine.executors.streams import StreamExecutor
from syncline.engine.executors.threads import ThreadExecutor
from syncline.engine.health.peer_errors import PeerMonitor
from syncline.engine.launch.batches import count_rounds, launch_batches
from syncline.engine.launch.units import Slot, StepContext, UnitRun, as_real, flat_state, gather_states, read_state
from syncline.engine.process_groups import GroupLike, Groups, parent_group, timeout_of
from syncline.engine.shutdown import close_when_collected
from syncline.errors import UsageError
from syncline.plan import Unit
from syncline.trace.record.recorder import Recorder, process_recorder


def ddp_hook(
    spec: str, *, exchange: str | None = None, process_group: GroupLike = None, seed: int = 0
) -> tuple["HookState", Callable[["HookState", GradBucket], "Future[Tensor]"]]:
    """The state and the hook for a codec: `ddp_model.register_comm_hook(*syncline.ddp_hook("acpsgd(rank=32) | bf16"))`.

    Call it once on every rank, and once for each DDP model. Keep the state if you save checkpoints: its
    `state_dict(ddp_model)` holds residuals and factors by parameter name.

    Args:
        spec: A codec spec such as `"powersgd(rank=4)"`; `"none"` is plain DDP.
        exchange: The communication pattern, such as `"ring"`. None: the codec's default.
        process_group: The process group of the DDP model. None: all ranks.
        seed: Seed of codecs that draw random numbers; the same on all ranks.
    """
    return HookState(spec, exchange=exchange, process_group=process_group, seed=seed), hook


def hook(state: "HookState", bucket: GradBucket) -> Future[Tensor]:
    """DDP calls this with every bucket. It reads the annotations, so those must not be strings."""
    return state.average(bucket)


class HookState:
    """The state of a DDP hook: a codec, its state by parameter, and the buckets of the current pass."""

    def __init__(self, spec: str, *, exchange: str | None, process_group: GroupLike, seed: int) -> None:
        self._exchange = _BucketExchange(spec, pattern=exchange, process_group=process_group, seed=seed)
        self._slots: dict[int, Slot] = {}
        self._units: list[UnitRun] = []
        self._unused_states: dict[int, dict[str, Tensor]] = {}
        """Codec state of parameters that have no bucket yet, by the parameter's `id`."""
        self._sent = 0
        self._complete = True
        inner = self._exchange  # not `self`, which could then never be collected
        close_when_collected(self, lambda: inner.close(reuse_groups=False))

    @property
    def step(self) -> int:
        """The number of backward passes that were exchanged."""
        return self._exchange.step

    def average(self, bucket: GradBucket) -> "Future[Tensor]":
        """Run the codec on a bucket; the future gives its buffer, with averaged gradients."""
        buffer = bucket.buffer()
        if self._exchange.world == 1:
            self._exchange.step += bucket.is_last()
            done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            done.set_result(buffer)
            return done
        if buffer.layout != torch.strided:
            raise UsageError("a bucket holds sparse gradients: build the model's embeddings with sparse=False")
        if bucket.index() == 0:
            self._finish_pass()
            self._complete = False
            self._exchange.begin(buffer.device)
        elif bucket.index() != self._sent:
            raise UsageError("buckets of two models come to one hook: call syncline.ddp_hook once for each model")
        unit, exchange = self._unit(bucket), self._exchange
        for launch in unit.launches:
            launch.context = StepContext(exchange.step, exchange.rank, exchange.world, exchange.seed)
        future = exchange.send(unit, buffer)
        self._sent += 1
        if bucket.is_last():
            self._complete = True
            self._exchange.step += 1
        return future

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's codec state, `"<parameter>.<key>"` to plain tensors, and the step; save one per rank.

        Names are those of the wrapped module, without DDP's "module.".
        """
        self._finish_pass()
        kept = self._unused_states | _states(self._units)
        states = {name: kept[id(p)] for name, p in _named(model).items() if id(p) in kept}
        return flat_state(states, self._exchange.step)

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict` of this hook or of `attach`, with any bucket size."""
        self._finish_pass()
        parameters = _named(model)
        states, step = read_state(state, parameters)
        self._unused_states = {
            id(parameters[n]): {k: t.to(parameters[n].device, copy=True) for k, t in s.items()}
            for n, s in states.items()
        }
        self._units = []
        self._exchange.step = step

    def close(self) -> None:
        """End all threads; DDP must not call the hook after this."""
        try:
            self._finish_pass()
        finally:
            self._exchange.close()

    def _finish_pass(self) -> None:
        """Wait for all buckets; keep their codec states if the pass was complete."""
        for unit in self._units[: self._sent]:
            self._exchange.wait(unit)
            for launch in unit.launches:
                if self._complete:
                    launch.commit()
                launch.tentative = None
        self._sent = 0

    def _unit(self, bucket: GradBucket) -> UnitRun:
        parameters: list[Any] = bucket.parameters()  # torch types them as tensors
        at = self._sent
        views = {id(p): as_real(_view(g, p)) for p, g in zip(parameters, _gradients(bucket), strict=True)}
        for p in parameters:
            # The first pass shows the parameters in an order that is the same on all ranks and in every run.
            number = len(self._slots)
            self._slots.setdefault(id(p), Slot(f"p{number}", p, number, p.detach()))
        if at >= len(self._units) or views.keys() != {id(slot.parameter) for slot in self._units[at].slots}:
            self._regroup(at, parameters)
        unit = self._units[at]
        unit.begin()
        unit.grads = [views[id(slot.parameter)] for slot in unit.slots]
        unit.targets = list(unit.grads)
        unit.takes_memory = [False] * len(unit.grads)  # averages go back into the bucket
        return unit

    def _regroup(self, at: int, parameters: Sequence[Tensor]) -> None:
        """DDP has formed other buckets from this one on: make new units; the state of parameters is kept."""
        self._unused_states |= _states(self._units[at:])
        del self._units[at:]
        # In an order of our own: DDP's follows the order in which gradients arrive.
        slots = sorted((self._slots[id(p)] for p in parameters), key=lambda slot: slot.index)
        exchange = self._exchange
        row = Unit(f"bucket {at}", tuple(slot.name for slot in slots), exchange.codec.text, exchange.pattern)
        unit = UnitRun(row, slots, exchange.links)
        states = {slot.name: self._unused_states.pop(id(slot.parameter), {}) for slot in slots}
        for launch in unit.launches:
            exchange.open(launch.rounds)
            for batch in launch.batches:
                batch.load({name: state for name, state in states.items() if state})
        self._units.append(unit)


def _states(units: Sequence[UnitRun]) -> dict[int, dict[str, Tensor]]:
    """The committed codec state by the parameter's `id`."""
    identity = {slot.name: id(slot.parameter) for unit in units for slot in unit.slots}
    return {identity[name]: state for name, state in gather_states(units, {}).items()}


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(getattr(model, "module", model).named_parameters())


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """The gradients of a bucket; torch's own `gradients()` are wrong for complex ones, whose buffer is real."""
    parameters: list[Tensor] = bucket.parameters()
    if not parameters[0].is_complex():
        return bucket.gradients()
    parts = torch.view_as_complex(bucket.buffer().view(-1, 2)).split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _view(grad: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in its bucket with the parameter's strides (channels last), as DDP lays it out."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.is_contiguous() or extent != parameter.numel():
        return grad
    return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset())


class _BucketThreads(ThreadExecutor):
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


class _BucketStreams(StreamExecutor):
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


class _BucketExchange:
    """Process groups, links and the executor for one model's buckets; `step` counts backward passes."""

    def __init__(self, spec: str, *, pattern: str | None, process_group: GroupLike, seed: int) -> None:
        self.codec = codecs.build(spec)
        self.pattern = str(exchanges.check(self.codec, pattern or exchanges.legal(self.codec)[0]))
        parent = parent_group(process_group, caller="ddp_hook")
        self.groups = Groups(parent, timeout_of(parent, None))
        self.seed, self.step = seed, 0
        self.rank, self.world = self.groups.rank, self.groups.world
        self.links: dict[str, list[exchanges.Link]] = {self.pattern: []}
        self._executor: _BucketThreads | _BucketStreams | None = None
        self._closed = self.world == 1
        if self._closed:
            return
        if exchanges.build(self.pattern).workers(self.world) != self.world:
            raise UsageError(f"exchange '{self.pattern}' needs ranks that do not train, and all ranks of DDP do: use"
                             f" {', '.join(n for n in exchanges.legal(self.codec) if n != 'server')}")  # fmt: skip
        usual = launch_batches(self.codec, ("matrix", "vector"), ((64, 64), (64,)), 1)
        self.open(count_rounds(usual[0])[0])
        self.groups.agree(f"{self.codec} {self.pattern} {seed}", "the hooks' settings")
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
            raise UsageError("this hook's state is closed: register a new syncline.ddp_hook on a new DDP model")
        if self._executor is None:
            recorder = process_recorder(device, group=self.groups.label)
            if device.type == "cuda":
                self._executor = _BucketStreams(recorder, device, peers=self._peers)
            else:
                self._executor = _BucketThreads(recorder, peers=self._peers, cut=self.groups.cut)
        self._peers.doing = f"step {self.step}: backward"
        self._executor.begin([])

    def send(self, unit: UnitRun, buffer: Tensor) -> "Future[Tensor]":
        """Launch a bucket behind those before it; the future gives `buffer`, filled with averaged gradients."""
        assert self._executor is not None
        return self._executor.send(unit, buffer)

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
