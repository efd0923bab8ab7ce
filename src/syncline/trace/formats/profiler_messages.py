"""Sizes of messages in a torch.profiler trace, from the host's calls where the kernels of collectives carry none."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from syncline.trace.formats.collective_names import elements, item_size
from syncline.trace.formats.profiler_rows import Interval, Rows
from syncline.trace.formats.trace_file import fields, whole

_NESTED = 8  # calls of one message inside one another, at most


def message_bytes(event: dict[str, Any]) -> int:
    """Bytes of a message: of the larger of input and output, or of the shapes that `record_shapes=True` gives."""
    args = fields(event)
    count = max(whole(args.get("In msg nelems"), 0), whole(args.get("Out msg nelems"), 0))
    if size := count * item_size(args.get("dtype")):
        return size
    shapes, kinds = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(kinds, list):
        return 0
    return sum(elements(shape) * item_size(kind) for shape, kind in zip(shapes, kinds, strict=False))


def with_bytes(rows: Rows, collectives: Sequence[Interval]) -> list[Interval]:
    """The collectives; where a kernel has no size, it is that of the call that launched it.

    Without the launch, the n-th kernel of a collective belongs to the n-th call of it if there are as many.
    """
    if all(each.bytes for each in collectives):
        return list(collectives)
    in_order = _in_order(rows, collectives)
    calls = {thread: sorted(mine) for thread, mine in rows.sized.items()}
    result = []
    for number, each in enumerate(collectives):
        launch = rows.launches.get(each.correlation)
        size = each.bytes
        if not size and launch is not None:
            size = _around(calls.get(launch.thread, []), launch.start)
        result.append(each._replace(bytes=size or in_order.get(number, 0)))
    return result


def _around(calls: Sequence[Interval], time: int) -> int:
    """The size of the innermost call around a time, which is the backend's own; 0 if there is none."""
    last = bisect_right(calls, time, key=lambda call: call.start)
    return next((call.bytes for call in reversed(calls[max(0, last - _NESTED) : last]) if call.end >= time), 0)


def _in_order(rows: Rows, collectives: Sequence[Interval]) -> dict[int, int]:
    """By place of a collective: the size of the call with the same number, of those that have the same name."""
    calls: dict[str, list[Interval]] = defaultdict(list)
    for one in sorted(one for mine in rows.sized.values() for one in mine):
        before = calls[one.kind][-1] if calls[one.kind] else None
        if before is not None and one.start <= before.end:
            calls[one.kind][-1] = one  # nested calls are one message
        else:
            calls[one.kind].append(one)
    places: dict[str, list[int]] = defaultdict(list)
    for number in sorted(range(len(collectives)), key=lambda number: collectives[number].start):
        places[collectives[number].kind].append(number)
    return {
        place: call.bytes
        for kind, mine in places.items()
        if len(mine) == len(calls[kind])
        for place, call in zip(mine, calls[kind], strict=True)
    }
