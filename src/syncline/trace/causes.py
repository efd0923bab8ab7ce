"""Causes of slow steps: each a function from facts to a finding with its evidence, or to nothing."""

from collections.abc import Callable

from syncline.trace.findings import Facts, Finding
from syncline.trace.robust import doubt, mean, usual

_LATE_SHARE = 0.65  # of all waits: below, ranks wait for one another in turn
_ALSO = 0.25  # of a late rank's excess: a phase with this much is named, too
_MANY = 4  # messages a step below which their number is not the trouble
_DOMINATES = 0.5  # start-up's share of the run
_CROWDED = 0.05  # of a step in the queue: below, the cores are not what is missing
_OTHERS = 0.75  # of the cores that the ranks could use: with less, somebody else does

Cause = Callable[[Facts], Finding | None]
CAUSES: list[Cause] = []
"""All causes that are looked for; `cause` adds one."""


def cause(function: Cause) -> Cause:
    """Look for this cause, too."""
    CAUSES.append(function)
    return function


@cause
def straggler(facts: Facts) -> Finding | None:
    """One rank comes late to exchanges, and the others wait for it."""
    if not facts.late or facts.late[0].share < _LATE_SHARE:
        return None
    late = facts.late[0]
    gains = usual(late.gains)
    longer = sum(ms for ms in late.excess.values() if ms > 0)
    named = sorted((p for p, ms in late.excess.items() if ms >= _ALSO * longer > 0), key=lambda p: -late.excess[p])
    if not named or facts.bound.compute_ms is None:
        return Finding(
            "straggler",
            f"Rank {late.rank} is the late one in {late.share:.0%} of all waits, by {gains:.1f} ms a step"
            f" ({facts.share(gains)}); the trace does not show what it was doing.",
            gains,
            doubt(late.gains),
        )
    gain = min(gains, sum(late.excess[phase] for phase in named))
    words = " and ".join(_words(phase) for phase in named)
    spent = {rank: sum(usual(facts.phases[phase].get(rank, ())) for phase in named) for rank in facts.ranks}
    others = [ms for rank, ms in spent.items() if rank != late.rank]
    compared = f" ({spent[late.rank]:.1f} ms there, the others {mean(others):.1f} ms)" if late.rank in spent else ""
    queued = {rank: ms for load in facts.loads for rank, ms in load.by_rank.items()}
    behind = queued.get(late.rank, 0.0) - mean([ms for rank, ms in queued.items() if rank != late.rank])
    why = f" Its thread stands {behind:.1f} ms longer in its host's queue." if behind > gain / 2 else ""
    return Finding(
        "straggler",
        f"Rank {late.rank} comes late, held up in {words}{compared}: the other ranks wait {late.wait_ms:.1f} ms a step"
        f" for it ({facts.share(late.wait_ms)} of the step, {late.share:.0%} of all waits).{why}",
        gain,
        doubt(late.gains),
    )


@cause
def in_turn(facts: Facts) -> Finding | None:
    """Ranks wait for one another, now for this one, now for that."""
    if not facts.late or facts.late[0].share >= _LATE_SHARE:
        return None
    waits = facts.series("wait")
    shares = ", ".join(f"rank {late.rank} {late.share:.0%}" for late in facts.late[:4])
    return Finding(
        "unclear",
        f"Ranks wait {usual(waits):.1f} ms a step ({facts.share(usual(waits))}) for one another, and no one is late"
        f" always ({shares}): uneven work, or a machine that others use, too.",
        usual(waits),
        doubt(waits),
    )


@cause
def input_bound(facts: Facts) -> Finding | None:
    """Every rank waits for its input."""
    columns = list(zip(*facts.phases["data"].values(), strict=True))
    # Of the ranks the lower middle one: where only some wait for input, they are stragglers.
    series = [sorted(column)[(len(column) - 1) // 2] for column in columns]
    gain = usual(series)
    each = ", ".join(f"rank {rank} {usual(values):.1f}" for rank, values in list(facts.phases["data"].items())[:8])
    return Finding(
        "input-bound",
        f"Every rank stands {gain:.1f} ms a step ({facts.share(gain)}) in its data loader ({each} ms): load ahead, with"
        " more workers, or do less to a sample.",
        gain,
        doubt(series),
    )


@cause
def bandwidth_bound(facts: Facts) -> Finding | None:
    """Bytes that no compute hides."""
    if facts.wire is None:
        return None
    wire, exposed = facts.wire, facts.series("exposed_exchange")
    part = 1 - wire.latency_share
    gain = usual(exposed) * part
    rate = f", {_bits(wire.bytes * 8e3 / wire.busy_ms)} while they move" if wire.bytes and wire.busy_ms else ""
    several = f" ({_size(wire.wire_bytes)} to and from a rank)" if wire.wire_bytes > 1.05 * wire.bytes else ""
    link = f"{several} over a link of {_bits(wire.link)}" if wire.link else several
    sized = f"{_size(wire.bytes)} a step" if wire.bytes else "messages of unknown size"
    hidden = f", {facts.communication:.0%} hidden" if facts.communication is not None else ""
    return Finding(
        "bandwidth-bound",
        f"{gain:.1f} ms a step ({facts.share(gain)}) are bytes on the wire that no compute hides: {sized} in"
        f" {wire.messages:.0f} message{'s' if round(wire.messages) != 1 else ''}{link}{rate}{hidden}.",
        gain,
        doubt(exposed),
    )


@cause
def latency_bound(facts: Facts) -> Finding | None:
    """Many small messages, each with its latency."""
    if facts.wire is None or facts.wire.messages < _MANY:
        return None
    wire, exposed = facts.wire, facts.series("exposed_exchange")
    # Ranks meet at every message: short waits in turn belong to it, those for a straggler do not.
    waits = facts.series("wait") if not facts.late or facts.late[0].share < _LATE_SHARE else [0.0] * facts.steps
    most = wire.messages * 2 * wire.latency_ms
    met = min(usual(waits), most)
    gain = (usual(exposed) * wire.latency_share + met) * (1 - 1 / wire.messages)
    at = {"assumed": " (taking a link of 100 Mbit/s at least)", "link": " (as the link's bandwidth leaves it)"}
    return Finding(
        "latency-bound",
        f"{gain:.1f} ms a step ({facts.share(gain)}) are what {wire.messages:.0f} messages of"
        f" {_size(wire.bytes / wire.messages)} on average cost beside their bytes{at.get(wire.known, '')}:"
        f" {gain / wire.messages:.2f} ms each, {met:.1f} ms of it for ranks to meet. Send them together.",
        gain,
        doubt(exposed),
    )


@cause
def oversubscribed(facts: Facts) -> Finding | None:
    """More threads want to run than the host has cores."""
    load = max(facts.loads, key=lambda one: usual(one.delay_ms), default=None)
    if load is None or not load.delay_ms:
        return None
    queue, crowd = usual(load.delay_ms), 0.0
    if facts.on_gpu:
        # The host runs ahead of its GPU: only where that stands idle has it come too late.
        queue = min(queue, facts.ms("other") + facts.ms("data"))
    elif len(facts.loads) == 1 and 0 < load.cores < len(load.ranks) and queue >= _CROWDED * facts.step_ms:
        # Between ranks of one host, messages are copied by the same cores; a shaped link takes its time all the same.
        on_link = facts.wire.wire_ms if facts.wire is not None and facts.wire.link else None
        moved = max(0.0, facts.ms("exposed_exchange") - (on_link or 0.0))
        crowd = moved * (1 - load.cores / len(load.ranks))
    ranks = f"{len(load.ranks)} rank{'s' if len(load.ranks) != 1 else ''}"
    cores = f" on {load.cores} core{'s' if load.cores != 1 else ''}" if load.cores else ""
    busy = load.cpu_ms / facts.step_ms if load.cpu_ms is not None and facts.step_ms else 0.0
    used = f" The ranks use {busy:.1f} cores." if load.cores and busy else ""
    others = bool(load.cores) and busy < _OTHERS * min(load.cores, len(load.ranks))
    who = "Other programs take the cores from" if others else "The host has too few cores for"
    copies = f"; {crowd:.1f} ms more are its messages, which the same cores copy" if crowd else ""
    return Finding(
        "oversubscribed",
        f"{who} its {ranks}{cores}: a training thread stands {queue:.1f} ms a step ({facts.share(queue)}) in the queue,"
        f" ready to run{copies}.{used}",
        min(queue + crowd, facts.step_ms),
        doubt(load.delay_ms),
        # Too few cores for the ranks make all else longer, too; what other programs take is one cause among others.
        leads=not others or 0 < load.cores < len(load.ranks),
    )


@cause
def start_up(facts: Facts) -> Finding | None:
    """The first steps are most of the run."""
    start = facts.startup
    if not facts.whole_ms or start.extra_ms < _DOMINATES * facts.whole_ms:
        return None
    reasons = ", ".join(f"{_words(phase)} {ms:.0f} ms" for phase, ms in start.causes[:3])
    return Finding(
        "start-up",
        f"{start.extra_ms:.0f} ms of {facts.whole_ms:.0f} ms are start-up: the first {start.steps}"
        f" step{'s' if start.steps != 1 else ''} of {facts.all_steps} ({reasons}); a steady step takes"
        f" {start.steady_ms:.1f} ms. A longer run shrinks its share.",
        start.extra_ms / facts.all_steps,
    )


@cause
def exposed_compression(facts: Facts) -> Finding | None:
    """Encoding and decoding that nothing hides."""
    series = facts.series("exposed_encode")
    gain = usual(series)
    return Finding(
        "compute-bound",
        f"{gain:.1f} ms a step ({facts.share(gain)}) are encoding and decoding that no compute hides: a cheaper codec,"
        " or fewer gradients compressed.",
        gain,
        doubt(series),
    )


def _words(phase: str) -> str:
    names = {"exposed_encode": "encoding", "exposed_exchange": "its transfers", "data": "data loading"}
    names |= {"other": "work outside the recorded lanes", "replan": "planning", "probe": "measuring"}
    return names.get(phase, phase)


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _bits(rate: float) -> str:
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if rate < 1000:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} Gbit/s"
