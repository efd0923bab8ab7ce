"""Build a `Codec` from a spec: check its arguments and its chain, and find its requests and sizes without data."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline import spec
from syncline.codecs.coder import Coder, then
from syncline.codecs.definition import CODECS, Definition
from syncline.codecs.program import Run
from syncline.codecs.requests import Gather, Out, Result, Steps, lower
from syncline.codecs.state import State
from syncline.codecs.wire import layout_of, nbytes
from syncline.errors import UsageError

LATE = 1 << 40
"""A step after every warm-up. It is even: LATE and LATE + 1 are the two kinds of step of an alternating codec."""


@dataclass(frozen=True)
class Round:
    """One communication of a codec: kind of request, number of values, bytes of one payload, and the coder."""

    kind: str
    count: int
    nbytes: int
    coder: Coder | None

    @property
    def adds(self) -> bool:
        """Whether payloads may be summed as they are, so that an all-reduce can carry them."""
        return self.coder is not None and self.coder.adds


@dataclass(frozen=True)
class Codec:
    """A codec with its arguments and the rest of its chain, ready to run."""

    definition: Definition
    options: Mapping[str, Any]
    text: str
    feedback: bool | str
    view: str
    spread: bool
    direct: bool
    inner: "Codec | None" = None
    tail: Coder | None = None
    calls: tuple[spec.Call, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash((self.text, self.definition))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and (self.text, self.definition) == (other.text, other.definition)

    def generate(self, grad: Tensor, state: State) -> Steps:
        """The author's generator on a gradient, without error feedback and chain."""
        extra = {"inner": self.inner} if self.inner else {}
        steps: Steps = self.definition.function(grad, state, **extra, **self.options)
        return steps

    def run(self, **where: Any) -> Run:
        """A `Run` of this codec; `where` is names, step, rank, world, seed, lengths."""
        return Run(self, **where)

    def with_options(self, **options: Any) -> "Codec":
        """The same codec with some options changed."""
        options = {**self.options, **options}
        return replace(self, options=options, text=str(spec.Call(self.definition.name, (), options)))

    def describe(self) -> dict[str, Any]:
        """Facts for tables and reports: spec, options, feedback, kinds of request, first line of the docstring."""
        doc = inspect.getdoc(self.definition.function) or ""
        return {
            "spec": self.text,
            "name": self.definition.name,
            "options": {**self.options, **({"inner": str(self.inner)} if self.inner else {})},
            "feedback": bool(self.feedback),
            "view": self.view,
            "requests": [r.kind for r in self.rounds((256, 256))],
            "summary": doc.partition("\n")[0],
        }

    def rounds(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, step: int = LATE, packed: bool = False,
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Round, ...]:  # fmt: skip
        """The communications of one step for a parameter of this shape, found without data.

        With `packed`, the shape is that of a `group.Batch`, where three dimensions are a batch of matrices; `lengths`
        are those of the batch.
        """
        if self.view == "matrix" and len(shape) > 1 and not packed:
            shape = (1, shape[0], torch.Size(shape[1:]).numel())
        return _rounds(self, tuple(shape), dtype, step, lengths)

    def wire_bytes(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, world_size: int = 2, exchange: Any = None,
        *, step: int | None = None, packed: bool = False, lengths: tuple[int, ...] | None = None,
    ) -> float:  # fmt: skip
        """Bytes that a rank sends in one step for a parameter (`packed`: for a batch) of this shape.

        Without an `exchange`: the bytes of its payloads, counted once. With a built exchange: what the busiest rank
        sends. Without a `step`: the average of two late steps, because acpsgd alternates.
        """
        if isinstance(exchange, str):
            raise UsageError(f"exchange '{exchange}' must be built first: syncline.exchange.build('{exchange}')")
        if step is None:
            both = [
                self.wire_bytes(shape, dtype, world_size, exchange, step=s, packed=packed, lengths=lengths)
                for s in (LATE, LATE + 1)
            ]
            return sum(both) / 2 if both[0] != both[1] else both[0]
        rounds = self.rounds(shape, dtype, step=step, packed=packed, lengths=lengths)
        if exchange is None:
            return sum(r.nbytes for r in rounds)
        sent: list[list[int]] = [exchange.sent_bytes(r, world_size) for r in rounds]
        per_rank: list[int] = [sum(bytes) for bytes in zip(*sent, strict=True)]
        return max(per_rank)


def available() -> list[str]:
    """The names of all codecs, those of installed packages included."""
    return CODECS.names()


def build(text: "str | Codec | tuple[spec.Call, ...]") -> Codec:
    """The codec of a spec such as `"topk(0.01) | int8"`; a wrong spec raises `UsageError` with the legal choices."""
    if isinstance(text, Codec):
        return text
    calls = spec.parse(text) if isinstance(text, str) else text
    codecs = [_one(call) for call in calls]
    head, tails = codecs[0], []
    for before, after in pairwise(codecs):
        _check_chain(before, after, spec.show(calls))
        assert after.definition.tail is not None
        tails.append(after.definition.tail(**after.options))
    tail = reduce(then, tails) if tails else None
    return replace(head, tail=tail, text=spec.show(calls), calls=calls)


def _one(call: spec.Call) -> Codec:
    definition = CODECS.get(call.name)
    kwargs = dict(call.kwargs)
    feedback = kwargs.pop("feedback", None)
    args, inner = call.args, None
    if definition.wraps:
        if not args:
            raise UsageError(f"'{call}' needs a codec: write {call.name}(topk(0.01), ...)")
        inner, args = build(args[0]), args[1:]
    given = spec.options(spec.Call(call.name, args, kwargs), definition.function, lead=3 if inner else 2)
    base: Definition | Codec = inner or definition
    if feedback not in (None, True, False):
        raise UsageError(f"'{call}': feedback is {feedback!r}; use true or false")
    if feedback is False and base.feedback == "own":
        raise UsageError(f"'{call}': {call.name} needs its error feedback: leave feedback=false out")
    chosen = base.feedback if feedback is None or base.feedback == "own" else feedback
    parameters = inspect.signature(definition.function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    made = Codec(
        definition, {**defaults, **given}, str(call), chosen, base.view, base.spread, base.direct, inner, calls=(call,)
    )
    _try_out(made)
    return made


def _try_out(codec: Codec) -> None:
    """Run the codec once on a few zeros, so that bad options fail here and not in the first step."""
    try:
        _dry(codec, torch.zeros(2, 4, 4) if codec.view == "matrix" else torch.zeros(5), LATE)
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"'{codec}': {error}") from error


def _check_chain(before: Codec, after: Codec, whole: str) -> None:
    carries = _carries(before)
    legal = [n for n in CODECS.names() if carries in CODECS.get(n).takes and n != before.definition.name]
    if after.definition.name in legal:
        return
    choices = ", ".join(legal) or "nothing"
    carries = "no floats" if carries == "nothing" else carries
    raise UsageError(
        f"'{whole}': {before.definition.name} sends {carries}, which {after.definition.name} cannot"
        f" encode; after {before.definition.name} you can chain {choices}"
    )


def _carries(codec: Codec) -> str:
    return _carries(codec.inner) if codec.inner else codec.definition.carries


@lru_cache(maxsize=16384)
def _rounds(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, step: int, lengths: tuple[int, ...] | None
) -> tuple[Round, ...]:
    try:
        return _dry(codec, torch.empty(shape, dtype=dtype, device="meta"), step, lengths)
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return _dry(codec, torch.zeros(shape, dtype=dtype), step, lengths)


def _dry(codec: Codec, grad: Tensor, step: int, lengths: tuple[int, ...] | None = None) -> tuple[Round, ...]:
    run = codec.run(step=step, world=2, lengths=lengths)
    rounds: list[Round] = []
    now = run.start(grad)
    while not isinstance(now, Result):
        if isinstance(now, Gather):
            size = nbytes(layout_of(now.payload))
            rounds.append(Round("gather", size, size, None))
            now = run.resume([now.payload, now.payload])
            continue
        merge = lower(now)
        count = merge.tensor.numel()
        kind = type(now).__name__.lower()
        rounds.append(Round(kind, count, nbytes(merge.coder.layout(count)), merge.coder))
        now = run.resume(Out(now.tensor, now.tensor) if kind == "merge" else now.tensor)
    return tuple(rounds)
