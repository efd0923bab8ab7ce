"""Launches that replay CUDA graphs: what a codec does between two messages is captured once, then replayed.

A launch of many kernels takes the host longer to issue than the device to run. Its gradients are copied into memory
that stays, which the codec turns into the new residual. Every message is summed in place, so all addresses are fixed.
The averages are copied out batch by batch: the next batch may use the memory of the last one's product.

Legal for codecs that declare `captures`, over an all-reduce. A pass that is not like the others (parameters that no
rank used, gradients accumulated over several exchanges) runs without a capture.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline._compat.tensors import copy_all, storage_address, storage_users
from syncline.codecs import Codec, Merge, Request, Result
from syncline.codecs.coder import Payload, coder
from syncline.engine.launch.batches import CodecBatch
from syncline.engine.launch.run import LaunchRun, joint_norm, new_state, norm_of, receive
from syncline.engine.launch.units import Launch
from syncline.exchange import AllReduce, Link
from syncline.trace import Recorder

WARM_UP = 2
"""Passes of a launch with codec states before it is captured: kernels are compiled and libraries set themselves up in
them. Few, so that the steps that follow a new plan, with which later ones are compared, are like those."""


class Tape(Protocol):
    """Captures work for one stream."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call `work`, whose work for the device is captured and not done; returns the function that does it."""
        ...

    def unowned(self, tensor: Tensor) -> Tensor:
        """A view of a tensor of the capture that does not keep its memory: later work may use that again."""
        ...


def why_eager(launch: Launch) -> str:
    """Why a launch cannot be captured; empty if it can."""
    exchanges = {str(link.exchange) for link in launch.links} - {"allreduce"}
    if exchanges:
        return f"{exchanges.pop()} is not an all-reduce, which works in fixed memory"
    reasons = (_why_codec_is_eager(batch.codec, whole=type(batch) is CodecBatch) for batch in launch.batches)
    return next(filter(None, reasons), "")


def can_capture(codec: Codec) -> bool:
    """Whether launches of this codec can be captured, over an all-reduce."""
    return not _why_codec_is_eager(codec, whole=True)


def _why_codec_is_eager(codec: Codec, *, whole: bool) -> str:
    if not codec.definition.captures or (codec.tail is not None and codec.tail.seeded):
        return f"{codec} does not declare that it does the same in every step"
    if codec.feedback is not True or not whole:
        return f"{codec} keeps no residual of whole tensors"
    return ""


def _is_like_others(launch: Launch) -> bool:
    """Whether this pass of a launch has all gradients, and begins with committed states."""
    return not launch.chain and all(target is not None for target in launch.unit.targets)


@dataclass
class _Part:
    """A piece of work for one batch, the result that it leaves, if any, and the members' parts of its output."""

    do: Callable[[], None]
    batch: CodecBatch
    result: Result | None
    averages: Sequence[tuple[int, int, Tensor]] = ()


@dataclass
class _Round:
    """Messages, the requests to sum them in their own memory, and what is done when they have arrived."""

    messages: list[Tensor]
    requests: list[Merge] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)


class CapturedLaunch:
    """The capture of a launch, with the memory it works on."""

    def __init__(self, launch: Launch, tape: Tape) -> None:
        grads, batches = launch.unit.grads, launch.batches
        self._batches = batches
        self._packed = [grads[batch.members[0]].new_zeros(batch.shape) for batch in batches]
        """Gradients of each batch, later its new residual."""
        pairs = zip(batches, self._packed, strict=True)
        self._inputs = [(place, part) for batch, packed in pairs for place, _, part in batch.outputs(packed)]
        # Nobody else's memory: the state of a checkpoint may be the user's.
        self._committed = [
            {key: t if storage_users(t) == 1 else t.clone() for key, t in batch.state.items()} for batch in batches
        ]
        self._after: list[dict[str, Tensor]] = [{} for _ in batches]
        self._tape = tape
        self._results: list[Result] = []
        """The result that the part which is being captured leaves."""
        self._rounds: list[_Round] = []
        self._moves: list[Any] = []
        run = LaunchRun(batches, launch.context, deliver=self._deliver)
        self._start = tape.capture(lambda: self._capture_start(run, launch.links))
        # The capture reads them at their addresses, whoever else still needs them.
        self._drawn = [each.state.drawn for each in run.runs if each is not None]
        while self._rounds[-1].messages:
            self._capture_round(run, launch.links)
        self._rounds.pop()
        self._saved = self._state_outside()
        """Pairs of memory that stays and of captured memory with a part of the new state."""

    def _state_outside(self) -> list[tuple[Tensor, Tensor]]:
        """Give the new state memory of its own: captures of other launches write to that of this one before it is read.

        The residuals of float32 gradients are in such memory already, that of the packed gradients.
        """
        saved = []
        for packed, state in zip(self._packed, self._after, strict=True):
            for key, tensor in state.items():
                if storage_address(tensor) != storage_address(packed):
                    state[key] = torch.empty_like(tensor)
                    saved.append((state[key], tensor))
        return saved

    def _capture_start(self, run: LaunchRun, links: Sequence[Link]) -> None:
        for place, (packed, state) in enumerate(zip(self._packed, self._committed, strict=True)):
            run.start_batch(place, packed, state, scratch=True)
        self._send(run.requests(), links)

    def _capture_round(self, run: LaunchRun, links: Sequence[Link]) -> None:
        now, places = self._rounds[-1], run.waiting
        given: dict[int, Any] = {}
        for place in places:

            def work(place: int = place) -> None:
                if place == places[0]:
                    given.update(run.split([_answer(*pair) for pair in zip(self._moves, now.messages, strict=True)]))
                run.resume_batch(place, given.pop(place))
                if place == places[-1]:
                    self._send(run.requests(), links)

            do = self._tape.capture(work)
            # Kept until here: what else is captured in this part must not use its memory before it is copied out.
            batch, result, averages = self._batches[place], self._results.pop() if self._results else None, []
            if result is not None and isinstance(result.mean, Tensor):
                result = replace(result, mean=self._tape.unowned(result.mean))
                averages = list(batch.outputs(result.output))
            now.parts.append(_Part(do, batch, result, averages))

    def _send(self, requests: Sequence[Request], links: Sequence[Link]) -> None:
        """The next round: the tensors that the all-reduce works on, as the exchange writes them."""
        number = len(self._rounds)
        self._moves = [links[number].exchange.moves(request, links[number].position) for request in requests]
        now = _Round([])
        for moves in self._moves:
            op = next(moves)
            assert isinstance(op, AllReduce), "other exchanges are not captured"
            now.messages.append(op.tensor)
            now.requests.append(_summed(op.tensor))
        self._rounds.append(now)

    def _deliver(self, place: int, result: Result) -> None:
        self._after[place] = new_state(result, self._committed[place])
        self._results.append(replace(result, state={}, sample=None))  # nobody else needs their memory

    def fits(self, launch: Launch) -> bool:
        """Whether states and gradients are still what was captured."""
        if launch.unit.grads[0].dtype != self._packed[0].dtype:
            return False
        now = [{key: t.shape for key, t in batch.state.items()} for batch in launch.batches]
        return now == [{key: t.shape for key, t in state.items()} for state in self._committed]

    def run(self, launch: Launch, recorder: Recorder) -> None:
        """Do what `run_launch` does, on the current stream."""
        unit, label, step = launch.unit, launch.label, recorder.step if launch.step < 0 else launch.step
        begin = recorder.mark("encode")
        moved: list[tuple[Tensor, Tensor]] = []
        for batch, committed in zip(self._batches, self._committed, strict=True):
            # The committed state may be what the last capture left, in the memory that is overwritten below.
            moved += [(t, batch.state[key]) for key, t in committed.items() if batch.state[key] is not t]
            batch.state = dict(committed)
        copy_all(moved)
        copy_all([(part, unit.grads[place]) for place, part in self._inputs])
        norms = [norm_of(packed) for packed in self._packed] if launch.measure else []
        launch.sample_gradients()
        averaged: list[Tensor] = []
        self._start()
        for number, now in enumerate(self._rounds):
            link = launch.links[number]
            end = recorder.mark("encode")
            recorder.add("encode", "encode", begin, end, unit=label, step=step)
            handles = [link.launch(request) for request in now.requests]
            for handle in handles:
                handle.wait()
            sent = sum(handle.sent_bytes for handle in handles)
            begin = recorder.mark("exchange")
            recorder.add("exchange", "allreduce", end, begin, unit=label, bytes=sent, step=step)
            for part in now.parts:
                part.do()
                if part.result is None:
                    continue
                averaged += [norm_of(part.result.output)] if launch.measure else []
                if part.averages:
                    unit.receive(part.averages)
                else:
                    receive(unit, part.batch, part.result)
        copy_all(self._saved)
        recorder.add("decode", "decode", begin, recorder.mark("decode"), unit=label, step=step)
        launch.norms = torch.stack([joint_norm(norms), joint_norm(averaged)]) if launch.measure else None
        launch.tentative = [dict(state) for state in self._after]
        launch.sample_averages()


def _answer(moves: Any, arrived: Tensor) -> Any:
    """The answer to a request, when its sum has arrived."""
    try:
        moves.send(arrived)
    except StopIteration as end:
        return end.value
    raise AssertionError("an all-reduce has one message")


def _as_is(x: Tensor, *, dtype: torch.dtype) -> Payload:
    return (x.to(dtype),)


def _from_as_is(payload: Payload, count: int) -> Tensor:
    del count
    return payload[0]


def _summed(message: Tensor) -> Merge:
    """The request to sum a tensor over the ranks in its own memory."""
    flat = message.view(-1)
    return Merge(flat, coder(_as_is, _from_as_is, adds=True, dtype=flat.dtype), mean=False, own=False, scratch=True)


class Captures:
    """The captures of all launches of an executor. Thread: the one that issues launches."""

    def __init__(self, make_tape: Callable[[], Tape]) -> None:
        """`make_tape` makes a tape for the current stream, before the first launch runs there."""
        self._make_tape = make_tape
        self._tapes: dict[int, Tape] = {}
        """By number of the stream."""
        self._passes: dict[Launch, int] = {}
        self._made: dict[Launch, tuple[int, CapturedLaunch]] = {}
        """By launch: its stream and its capture."""
        self._eager: dict[Launch, str] = {}
        """Of all launches, why they cannot be captured; empty if they can."""
        self._threads: set[int] = set()
        """Threads that have run such launches: libraries have handles for each thread, made at their first use."""
        self.changed = False
        """Whether `report` may say something else than before."""

    def begin(self, order: Sequence[Launch]) -> None:
        """A pass begins; launches of other plans are forgotten."""
        if len(order) != len(self._eager) or any(launch not in self._eager for launch in order):
            kept = set(order)
            self._made = {launch: made for launch, made in self._made.items() if launch in kept}
            self._passes = {launch: self._passes.get(launch, 0) for launch in order}
            self._eager = {launch: why_eager(launch) for launch in order}
            self.changed = True

    def of(self, launch: Launch, stream: int, *, allowed: bool = True) -> CapturedLaunch | None:
        """The capture to use in this pass, on this stream; if there is none, `allowed` says whether to make it."""
        if self._eager.get(launch, "-") or not _is_like_others(launch):
            return None
        if stream not in self._tapes:
            self._tapes[stream] = self._make_tape()
        has_states = all(batch.state for batch in launch.batches)
        self._passes[launch] += has_states  # without states, other kernels run
        thread = threading.get_ident()
        known, made = self._made.get(launch, (-1, None))
        if made is not None and known == stream and made.fits(launch):
            return made
        self._made.pop(launch, None)
        warm = thread in self._threads and self._passes[launch] > WARM_UP
        if not allowed or not warm or not has_states:
            self._threads.add(thread)
            return None
        self.changed = True
        made = CapturedLaunch(launch, self._tapes[stream])
        self._made[launch] = stream, made
        return made

    def report(self) -> str:
        """Which launches replay captures, and why others do not."""
        self.changed = False
        reasons = dict.fromkeys(why for why in self._eager.values() if why)
        return "; ".join([f"{len(self._made)} of {len(self._eager)} launches replay CUDA graphs", *reasons])
