"""Run one launch: encode, exchange (as often as the codec asks), decode, and keep the codec's new state.

The executors call `run_launch`: on the CPU in worker threads, on CUDA to put all its work on a side stream at once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from syncline._compat.tensors import storage_address
from syncline.codecs import Codec, Gather, Merge, Request, Result
from syncline.codecs.ops import finite, keep_if
from syncline.codecs.program import adds_residual
from syncline.codecs.requests import Product, answer, lower
from syncline.codecs.state import Memory
from syncline.engine.launch.batches import CodecBatch
from syncline.engine.launch.bf16_buffers import Bf16Buffers
from syncline.engine.launch.reused_memory import ReusedMemory
from syncline.engine.launch.units import Launch, StepContext, UnitRun
from syncline.trace import Recorder

Turn = Callable[[Launch, int], AbstractContextManager[None]]


def run_launch(launch: Launch, recorder: Recorder, turn: Turn | None, memory: ReusedMemory | None = None) -> None:
    """Turn a launch's gradients into averaged gradients; collectives are issued inside `turn(launch, round)`.

    Without turns nothing happens between a codec's work and its exchange, and one time mark serves both. `memory`: for
    large tensors, on a CPU.
    """
    unit, label, step = launch.unit, launch.label, recorder.step if launch.step < 0 else launch.step
    # Other exchanges sum in float32; and norms are taken of the gradient before it is overwritten.
    reuse = all(str(link.exchange) == "allreduce" for link in launch.links) and not launch.measure
    chained = launch.tentative if launch.chain else None
    before = [dict(batch.state) for batch in launch.batches] if chained is None else chained
    unused = frozenset(place for place, target in enumerate(unit.targets) if target is None)
    delivery = _Delivery(launch, before, unused, memory)
    buffers = launch.buffers if reuse else None
    run = LaunchRun(launch.batches, launch.context, buffers=buffers, deliver=delivery.take, memory=memory)
    begin = recorder.mark("encode")
    launch.sample_gradients()
    given = before if not unused else [_zeroed(*pair, unused) for pair in zip(launch.batches, before, strict=True)]
    requests = run.start(unit.grads, given)
    end = recorder.mark("encode")
    recorder.add("encode", "encode", begin, end, unit=label, step=step)
    number = 0
    while requests:
        link = launch.links[number]
        with turn(launch, number) if turn is not None else nullcontext():
            begin = end if turn is None else recorder.mark("exchange")
            handles = [link.launch(request) for request in requests]
        answers = [handle.wait() for handle in handles]
        sent = sum(handle.sent_bytes for handle in handles)
        end = recorder.mark("exchange")
        recorder.add("exchange", str(link.exchange), begin, end, unit=label, bytes=sent, step=step)
        begin = end
        requests = run.resume(answers)
        lane, name = ("encode", "encode") if requests else ("decode", "decode")
        end = recorder.mark(lane)
        recorder.add(lane, name, begin, end, unit=label, step=step)
        number += 1
    delivery.end()


def _zeroed(batch: CodecBatch, state: dict[str, Tensor], unused: frozenset[int]) -> dict[str, Tensor]:
    """A batch's state without the residuals of parameters that no rank used: there is no gradient to send them with."""
    if "error" not in state or unused.isdisjoint(batch.members):
        return state
    error = state["error"].clone()
    for part in batch.of_members(error, unused):
        part.zero_()
    return {**state, "error": error}


def _with_old_parts(
    batch: CodecBatch, new: dict[str, Tensor], old: dict[str, Tensor], unused: frozenset[int]
) -> dict[str, Tensor]:
    """The new state of a batch, with the old one of parameters that no rank used."""
    if unused.isdisjoint(batch.members):
        return new
    if not new and "error" in old:  # another codec's residual, which was sent for the other parameters
        new = {"error": torch.zeros_like(old["error"])}
    kept = {key: tensor.clone() for key, tensor in new.items()}
    for key, tensor in kept.items():
        parts = batch.of_members(tensor, unused)
        if key in old:
            for part, before in zip(parts, batch.of_members(old[key], unused), strict=True):
                part.copy_(before)
        elif key == "error":
            for part in parts:
                part.zero_()
    return kept


class _Delivery:
    """Takes the results of a launch one by one, so that their memory is free again before the next one is made."""

    def __init__(
        self,
        launch: Launch,
        before: list[dict[str, Tensor]],
        unused: frozenset[int],
        memory: ReusedMemory | None,
    ) -> None:
        self._launch, self._before, self._unused, self._memory = launch, before, unused, memory
        self._after: list[dict[str, Tensor]] = [{} for _ in before]
        self._local: list[Tensor] = []
        self._averaged: list[Tensor] = []

    def take(self, place: int, result: Result) -> None:
        """Write a batch's averaged gradients back; its new codec state is tentative until a step commits it."""
        launch, old = self._launch, self._before[place]
        batch, unit = launch.batches[place], launch.unit
        if launch.measure:  # now, because the user may scale or clip the gradients later
            self._local.append(norm_of(batch.pack(unit.grads)))
            self._averaged.append(norm_of(result.output))
        state = new_state(result, old)
        self._after[place] = _with_old_parts(batch, state, old, self._unused) if self._unused else state
        receive(unit, batch, result, self._memory)

    def end(self) -> None:
        """All batches have their results."""
        launch = self._launch
        launch.norms = torch.stack([joint_norm(self._local), joint_norm(self._averaged)]) if launch.measure else None
        launch.tentative = self._after
        launch.sample_averages()


def receive(unit: UnitRun, batch: CodecBatch, result: Result, memory: ReusedMemory | None = None) -> None:
    """Make a result the averaged gradients of a batch's parameters; `memory` that it is in will be used again."""
    if isinstance(result.mean, Product):
        if not unit.compute(batch.members[0], result.mean):
            unit.receive(batch.outputs(result.output))
        return
    unit.receive(batch.outputs(result.mean), copy=memory is not None and memory.owns(result.mean))


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all values together, in float32."""
    return joint_norm([norm_of(tensor) for tensor in tensors])


def norm_of(tensor: Tensor) -> Tensor:
    """The norm of a tensor, in float32."""
    wide = tensor.dtype == torch.float64
    value: Tensor = torch.linalg.vector_norm(tensor, dtype=None if wide else torch.float32).float()
    return value


def joint_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all values together, from the norms of their tensors."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


def new_state(result: Result, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new state if the output is finite, else the old one: a broken step must not change residuals.

    The output is the same on every rank, so every rank decides alike; on CUDA the device decides.
    """
    new = dict(result.state)
    if not result.shape.numel() or not (new or "error" in old):
        return new
    good = finite(result.output if result.sample is None else result.sample)
    if good.device.type == "cpu":
        return new if good else dict(old)
    if not new:
        new = {"error": torch.zeros_like(old["error"])}  # it was added to this gradient, unless the step is broken
    kept: dict[str, Tensor] = {}
    for key, t in new.items():
        # The residual is in memory of its own, as large as the gradient; other state may share the answer's memory.
        if key == "error":
            kept[key] = keep_if(good, t, old.get(key))
        else:
            kept[key] = torch.where(good, t, old[key].view_as(t) if key in old else t.new_zeros(()))
    return kept


class LaunchRun:
    """One run of a launch's codec over its batches: requests out, answers in, until every batch has its result.

    Batches share a message where their payloads can be added.
    """

    def __init__(
        self,
        batches: Sequence[CodecBatch],
        context: StepContext,
        *,
        deliver: Callable[[int, Result], None],
        buffers: Bf16Buffers | None = None,
        memory: Memory | None = None,
    ) -> None:
        """`deliver(place, result)` gets the result of each batch as soon as there is one."""
        self.batches, self.context, self._buffers, self._deliver = batches, context, buffers, deliver
        self._memory = memory
        self.runs: list[Any] = []
        """The codec's run for each batch; None when it has its result."""
        self._waiting: list[tuple[int, Request]] = []
        self._round = 0
        self._messages: list[tuple[list[int], list[Request]]] = []
        """The messages on the network: their batches, and the requests that each of these made."""

    def start(self, grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> list[Request]:
        """The first requests; `states` has the codec state of every batch."""
        for place, (batch, state) in enumerate(zip(self.batches, states, strict=True)):
            if self._memory is not None and adds_residual(batch.codec, state, grads[batch.members[0]].dtype):
                packed = batch.pack_sum(grads, state["error"], self._memory)
                self.start_batch(place, packed, state, scratch=True, compensated=True)
                continue
            packed = batch.pack(grads)
            if not batch.codec.feedback and "error" in state:
                # A residual of another codec is added to the next gradient.
                packed = packed + state["error"].view(packed.shape).to(packed.dtype)
                state = {key: tensor for key, tensor in state.items() if key != "error"}
            copied = storage_address(packed) != storage_address(grads[batch.members[0]])
            self.start_batch(place, packed, state, scratch=copied)
        return self.requests()

    def start_batch(
        self, place: int, packed: Tensor, state: Mapping[str, Tensor], *, scratch: bool, compensated: bool = False
    ) -> None:
        """Start one batch, in their order, with its packed gradient; `scratch` allows to overwrite that.

        `compensated`: the residual has been added to it.
        """
        batch, context = self.batches[place], self.context
        where = {"step": context.step, "rank": context.rank, "world": context.world, "seed": context.seed}
        run = batch.codec.run(names=batch.names, lengths=batch.lengths, memory=self._memory, **where)
        self.runs.append(run)
        self._sort(place, run.start(packed, state, scratch=scratch, compensated=compensated))

    def resume(self, answers: Sequence[Any]) -> list[Request]:
        """The next requests; none when all batches have their results."""
        given = self.split(answers)
        for place in sorted(given):
            self.resume_batch(place, given.pop(place))
        return self.requests()

    def split(self, answers: Sequence[Any]) -> dict[int, Any]:
        """The answer to each batch, from the answers to the messages."""
        given: dict[int, Any] = {}
        for (members, requests), got in zip(self._messages, answers, strict=True):
            given.update(zip(members, self._split(requests, got), strict=True))
        return given

    @property
    def waiting(self) -> list[int]:
        """The batches whose requests are on the network."""
        return sorted(place for members, _ in self._messages for place in members)

    def resume_batch(self, place: int, answer: Any) -> None:
        """Continue one batch; its next request is one of the next `requests`."""
        self._sort(place, self.runs[place].resume(answer))

    def _sort(self, place: int, item: Request | Result) -> None:
        """Deliver a result, or put a request to those that wait for their answers."""
        if isinstance(item, Result):
            self.runs[place] = None
            self._deliver(place, item)
        else:
            self._waiting.append((place, _without_own_share(self.batches[place].codec, item)))

    def requests(self) -> list[Request]:
        """The requests of the batches that wait for answers, as few messages as possible."""
        self._messages, self._waiting = _group(self._waiting), []
        self._round += 1
        return [self._join(requests, number) for number, (_, requests) in enumerate(self._messages)]

    def _join(self, requests: Sequence[Request], number: int) -> Request:
        """One request that carries all of these."""
        merges = self._buffered(requests)
        if merges:
            assert self._buffers is not None
            return self._buffers.write(merges, self.context.world, key=(self._round, number))
        if len(requests) == 1:
            return requests[0]
        merges = [lower(request) for request in requests]
        first = merges[0]
        joined = torch.cat([m.whole() for m in merges])
        tracked = any(m.tracks_loss for m in merges)
        return Merge(joined, first.coder, first.seed, first.mean, own=False, scratch=not tracked, keep=tracked)

    def _split(self, requests: Sequence[Request], got: Any) -> list[Any]:
        """The answer to each of these requests, from the answer to the one that carried them."""
        merges = self._buffered(requests)
        if merges:
            assert self._buffers is not None
            return [answer(r, out) for r, out in zip(requests, self._buffers.read(merges, got.mean), strict=True)]
        if len(requests) == 1:
            return [got]
        sizes = [request.tensor.numel() for request in requests if not isinstance(request, Gather)]
        means = got.mean.view(-1).split(sizes)
        losses = [None] * len(sizes) if got.residual is None else got.residual.view(-1).split(sizes)
        parts = zip(requests, means, losses, strict=True)
        return [answer(request, lower(request).out(mean, lost)) for request, mean, lost in parts]

    def _buffered(self, requests: Sequence[Request]) -> list[Merge]:
        """These as merges, if they are to be written into a buffer of the launch; else none."""
        if self._buffers is None or any(isinstance(request, Gather) for request in requests):
            return []
        merges = [lower(request) for request in requests]
        return merges if all(self._buffers.can_send(merge) for merge in merges) else []


def _without_own_share(codec: Codec, request: Request) -> Request:
    """Codecs without feedback do not need this rank's own share back, nor the local gradient afterwards."""
    if not isinstance(request, Merge) or codec.feedback or not request.coder.adds:
        return request
    return replace(request, own=False, scratch=codec.definition.name in ("none", "bf16") and codec.tail is None)


def _group(waiting: Sequence[tuple[int, Request]]) -> list[tuple[list[int], list[Request]]]:
    """Requests that can travel in one message: their payloads add up and have the same coding."""
    groups: dict[Any, list[tuple[int, Request]]] = {}
    for place, request in waiting:
        key: Any = place
        if not isinstance(request, Gather):
            merge = lower(request)
            if merge.coder.adds:
                key = ("adds", merge.coder, merge.mean, merge.tensor.dtype)
        groups.setdefault(key, []).append((place, request))
    return [([p for p, _ in group], [r for _, r in group]) for group in groups.values()]
