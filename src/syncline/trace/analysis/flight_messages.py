"""Unfinished sends and receives in flight-recorder dumps, and the ranks that they wait for.

The n-th send from one rank to another belongs to the n-th receive there.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

from syncline.trace.analysis.flight_calls import FlightFinding, GroupCalls, describe, place
from syncline.trace.analysis.flight_mismatch import MISMATCH
from syncline.trace.formats.flight_read import Call

MISSING, NOT_FINISHED = "missing", "not finished"

_MESSAGE = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})", re.ASCII)


def unfinished_messages(group: GroupCalls) -> list[FlightFinding]:
    """What the unfinished sends and receives of a group wait for."""
    pairs: dict[tuple[int, int], dict[str, list[Call]]] = defaultdict(lambda: {"send": [], "recv": []})
    for call in group.messages:
        found = _MESSAGE.fullmatch(call.op)
        if found is None:
            continue
        first, second = int(found[2]), int(found[3])
        pair = (first, second) if found[1] == "send" else (second, first)
        if max(pair) < len(group.members):
            pairs[pair][found[1]].append(call)
    findings = []
    for (source, target), calls in pairs.items():
        ends = {"send": group.members[source], "recv": group.members[target]}
        if set(ends.values()) & group.full:
            # Nobody knows how many older calls each side has lost: compare those that are not finished.
            calls = {side: [call for call in mine if not call.done] for side, mine in calls.items()}
        if both := _both_called(group, calls["send"], calls["recv"]):
            findings.append(both)  # what comes after it waits for it
            continue
        for mine, theirs in (("send", "recv"), ("recv", "send")):
            waiting = [call for call in calls[mine][len(calls[theirs]) :] if not call.done]
            if waiting and ends[theirs] in group.calls:
                findings.append(_not_called(group, waiting[0], theirs, ends[theirs]))
    return findings


def _not_called(group: GroupCalls, call: Call, theirs: str, other: int) -> FlightFinding:
    sentence = (
        f"rank {other} never called the {theirs} for {describe(call)} of {group.label}; rank {call.rank} waits for"
        f" it{place(call)}"
    )
    return _finding(MISSING, (other,), sentence, group, call, (call.rank,))


def _both_called(group: GroupCalls, sends: Sequence[Call], recvs: Sequence[Call]) -> FlightFinding | None:
    """The first message of a pair that both sides have called and not finished, or called with different sizes."""
    for send, recv in zip(sends, recvs, strict=False):
        ranks = tuple(sorted((send.rank, recv.rank)))
        if send.done and recv.done:
            continue
        if (send.elements, send.dtypes[:1]) != (recv.elements, recv.dtypes[:1]):
            sentence = (
                f"rank {send.rank} called {describe(send)}{place(send)} of {group.label}, but rank {recv.rank} called"
                f" {describe(recv)}{place(recv)}"
            )
            return _finding(MISMATCH, ranks, sentence, group, send, ())
        sentence = (
            f"ranks {send.rank} and {recv.rank} have both called {describe(send)} of {group.label}{place(send)}, and it"
            " is not finished: the network is slow or broken, or the dumps were taken during it"
        )
        return _finding(NOT_FINISHED, (), sentence, group, send, ranks)
    return None


def _finding(
    kind: str, ranks: tuple[int, ...], sentence: str, group: GroupCalls, call: Call, waiting: tuple[int, ...]
) -> FlightFinding:
    sizes = call.inputs or call.outputs
    return FlightFinding(
        kind, ranks, sentence, group.label, call.sequence, call.op, sizes, waiting, call.user_frames
    )  # fmt: skip
