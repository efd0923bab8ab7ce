"""Sizes and process groups of messages in a torch.profiler trace, from the host's calls where kernels carry none."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from syncline.trace.formats.collective_names import elements, item_size
from syncline.trace.formats.profiler_rows import Interval, Rows
from syncline.trace.formats.trace_file import fields, text, whole
from syncline.trace.span import POINT_TO_POINT, group_label, is_copy_name

_NUMBER = re.compile(r"\d{1,7}", re.ASCII)
_PEERS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})", re.ASCII)
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


def message_group(event: dict[str, Any], *, world: int) -> tuple[str, int]:
    """The process group of a collective and its number in that group; empty and -1 where the event does not say.

    `world`: the number of all ranks; a group of all of them has no name.
    """
    args = fields(event)
    name, ranks = args.get("Process Group Name"), _ranks(args.get("Process Group Ranks"))
    if not isinstance(name, str) or not name:
        return "", -1
    everybody = world > 0 and whole(args.get("Group size"), len(ranks)) == world
    return "" if everybody else group_label(text(name), ranks), whole(args.get("Seq"))


def message_peers(event: dict[str, Any], name: str, *, rank: int) -> str:
    """Sender and receiver of a point-to-point message, such as `0->1`; empty where the event does not say.

    `rank`: that of the trace. Events have the other one, and the names of NCCL's ranges have both.
    """
    args = fields(event)
    sender, receiver = whole(args.get("Src Rank"), rank), whole(args.get("Dst Rank"), rank)
    if sender != receiver and min(sender, receiver) >= 0:
        return f"{sender}->{receiver}"
    if found := _PEERS.search(name):
        first, second = int(found[2]), int(found[3])
        return f"{first}->{second}" if found[1] == "send" else f"{second}->{first}"
    return ""


def _ranks(listed: object) -> list[int]:
    """The ranks of a group, from a text such as `[0, 1]`; what a long list leaves out (`...`) is missing."""
    return [int(number) for number in _NUMBER.findall(listed[:20_000])] if isinstance(listed, str) else []


def claim_kernels(rows: Rows) -> None:
    """If no collective was found by its name, kernels that a collective's call launched are its own.

    Libraries other than NCCL name theirs as they like. Where NCCL's are known, the calls' other kernels are copies.
    """
    if rows.collectives:
        return
    calls = {thread: sorted(mine) for thread, mine in rows.calls.items()}
    kept = []
    for kernel in rows.kernels:
        launch = rows.launches.get(kernel.correlation)
        around = [] if launch is None else _around(calls.get(launch.thread, []), launch.start)
        if not around or is_copy_name(kernel.name):
            kept.append(kernel)
            continue
        call = next((call for call in around if call.kind != "exchange"), around[0])
        rows.collectives.append(kernel._replace(kind=call.kind, bytes=call.bytes, name=""))
    rows.kernels = kept


def with_calls(rows: Rows, collectives: Sequence[Interval]) -> list[Interval]:
    """The collectives; where a kernel has no size or group, they are those of the call that launched it.

    Without the launch, the n-th kernel of a collective belongs to the n-th call of it if there are as many.
    """
    in_order = _in_order(rows, collectives) if not all(each.bytes for each in collectives) else {}
    calls = {thread: sorted(mine) for thread, mine in rows.sized.items()}
    result = []
    for number, each in enumerate(collectives):
        launch = rows.launches.get(each.correlation)
        around = [] if launch is None else _around(calls.get(launch.thread, []), launch.start)
        size = each.bytes or next((call.bytes for call in around if call.bytes), in_order.get(number, 0))
        known = [call for call in (each, *around) if call.group or call.sequence >= 0]
        # Both sides of a message have the same group, with its sender and receiver.
        named = next((call for call in known if call.kind == POINT_TO_POINT), known[0] if known else each)
        kind = POINT_TO_POINT if named.kind == POINT_TO_POINT else each.kind
        result.append(each._replace(kind=kind, bytes=size, group=named.group, sequence=named.sequence))
    return result


def _around(calls: Sequence[Interval], time: int) -> list[Interval]:
    """The calls around a time, the innermost first, which is the backend's own."""
    last = bisect_right(calls, time, key=lambda call: call.start)
    return [call for call in reversed(calls[max(0, last - _NESTED) : last]) if call.end >= time]


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
