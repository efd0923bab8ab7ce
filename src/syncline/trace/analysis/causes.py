"""Causes of slow steps: each a function from facts to a finding with its evidence, or to nothing."""

from collections.abc import Callable, Sequence

from syncline.stats import mean_or_zero, two_standard_errors, winsorized_mean
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.wording import bits, size, words

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
    gains = winsorized_mean(late.gains)
    longer = sum(ms for ms in late.excess.values() if ms > 0)
    named = sorted((p for p, ms in late.excess.items() if ms >= _ALSO * longer > 0), key=lambda p: -late.excess[p])
    if not named or facts.bound.compute_ms is None:
        return Finding(
            "straggler",
            f"Rank {late.rank} is the late one in {late.share:.0%} of all waits, by {gains:.1f} ms a step"
            f" ({facts.share(gains)}); the trace does not show what it was doing.",
            gains,
            two_standard_errors(late.gains),
        )
    gain = min(gains, sum(late.excess[phase] for phase in named))
    held_up = " and ".join(words(phase) for phase in named)
    spent = {rank: sum(winsorized_mean(facts.phases[phase].get(rank, ())) for phase in named) for rank in facts.ranks}
    others = [ms for rank, ms in spent.items() if rank != late.rank]
    compared = (
        f" ({spent[late.rank]:.1f} ms there, the others {mean_or_zero(others):.1f} ms)" if late.rank in spent else ""
    )
    queued = {rank: ms for load in facts.loads for rank, ms in load.by_rank.items()}
    behind = queued.get(late.rank, 0.0) - mean_or_zero([ms for rank, ms in queued.items() if rank != late.rank])
    why = f" Its thread stands {behind:.1f} ms longer in its host's queue." if behind > gain / 2 else ""
    return Finding(
        "straggler",
        f"Rank {late.rank} comes late, held up in {held_up}{compared}: the other ranks wait {late.wait_ms:.1f} ms a"
        f" step for it ({facts.share(late.wait_ms)} of the step, {late.share:.0%} of all waits).{why}",
        gain,
        two_standard_errors(late.gains),
    )


@cause
def in_turn(facts: Facts) -> Finding | None:
    """Ranks wait for one another, now for this one, now for that."""
    if not facts.late or facts.late[0].share >= _LATE_SHARE:
        return None
    # Without what makes each late in its turn a step is shorter by all they cost; with the same work spread evenly, by
    # the mean wait. Short waits at many messages are latency's.
    waits = facts.series("wait")
    wait_ms = winsorized_mean(waits)
    left = 1 - _met(facts) / wait_ms if wait_ms else 0.0
    turns = zip(waits, *(late.gains for late in facts.late), strict=True)
    series = [left * max(wait, sum(gains)) for wait, *gains in turns]
    gain = winsorized_mean(series)
    shares = ", ".join(f"rank {late.rank} {late.share:.0%}" for late in facts.late[:4])
    return Finding(
        "unclear",
        f"Ranks wait {wait_ms:.1f} ms a step ({facts.share(wait_ms)}) for one another, and no one is late"
        f" always ({shares}): uneven work, or a machine that others use, too. Without, a step is {gain:.1f} ms"
        " shorter.",
        gain,
        two_standard_errors(series),
    )


@cause
def input_bound(facts: Facts) -> Finding | None:
    """Most ranks wait for their input."""
    data, none = facts.phases["data"], (0.0,) * facts.steps
    loading = _lower_middle(list(data.values()))
    hidden = {rank: facts.behind_data.get(rank, none) for rank in data}
    # What loading hides of an exchange comes to light without it.
    series = _lower_middle([[max(0.0, a - b) for a, b in zip(of, hidden[r], strict=True)] for r, of in data.items()])
    gain, stands = winsorized_mean(series), winsorized_mean(loading)
    each = ", ".join(f"rank {rank} {winsorized_mean(values):.1f}" for rank, values in list(data.items())[:8])
    slow = sum(winsorized_mean(values) >= stands / 2 for values in data.values())
    who = "Every rank stands" if slow == len(data) else f"{slow} of {len(data)} ranks stand"
    back = (
        f" {stands - gain:.1f} ms of that hide an exchange, which would show instead." if stands > 1.01 * gain else ""
    )
    return Finding(
        "input-bound",
        f"{who} {stands:.1f} ms a step ({facts.share(stands)}) in the data loader ({each} ms): load ahead, with"
        f" more workers, or do less to a sample.{back}",
        gain,
        two_standard_errors(series),
    )


@cause
def bandwidth_bound(facts: Facts) -> Finding | None:
    """Bytes that no compute hides."""
    if facts.wire is None:
        return None
    wire, exposed = facts.wire, facts.series("exposed_exchange")
    many = wire.bits is not None and wire.messages >= _MANY
    # Few messages cannot be made fewer: all that they take is the wire's.
    gain = winsorized_mean(exposed) * (1 - wire.latency_share if many else 1.0)
    what, apart = "bytes on the wire", ""
    if wire.bits is None:
        what, apart = "transfers", "; without sizes, bytes and latency cannot be told apart"
    elif not many and wire.latency_share and wire.known == "assumed":
        what, apart = "transfers", "; of messages this few and small, bytes and latency cannot be told apart"
    elif not many and wire.latency_share * gain >= 0.05:
        what, apart = "transfers", f"; {gain * wire.latency_share:.1f} ms of it are latency"
    what += "" if facts.waits_told else ", or waits for another rank,"
    rate = f", {bits(wire.bytes * 8e3 / wire.busy_ms)} while they move" if wire.bytes and wire.busy_ms else ""
    several = f" ({size(wire.wire_bytes)} to and from a rank)" if wire.wire_bytes > 1.05 * wire.bytes else ""
    link = f"{several} over a link of {bits(wire.link)}" if wire.link else several
    number = f"{wire.messages:.0f} message{'s' if round(wire.messages) != 1 else ''}"
    sized = f"{size(wire.bytes)} a step in {number}" if wire.bytes else f"{number} of unknown size"
    hidden = f", {facts.communication:.0%} hidden" if facts.communication is not None else ""
    return Finding(
        "bandwidth-bound",
        f"{gain:.1f} ms a step ({facts.share(gain)}) are {what} that no compute hides:"
        f" {sized}{link}{rate}{hidden}{apart}.",
        gain,
        two_standard_errors(exposed),
    )


@cause
def latency_bound(facts: Facts) -> Finding | None:
    """Many small messages, each with its latency."""
    wire, exposed = facts.wire, facts.series("exposed_exchange")
    if wire is None or wire.bits is None or wire.messages < _MANY:
        return None
    met = _met(facts)
    gain = (winsorized_mean(exposed) * wire.latency_share + met) * (1 - 1 / wire.messages)
    unsure = "" if facts.waits_told else " Or waits for another rank."
    at = {"assumed": " (taking a link of 100 Mbit/s at least)", "link": " (as the link's bandwidth leaves it)"}
    return Finding(
        "latency-bound",
        f"{gain:.1f} ms a step ({facts.share(gain)}) are what {wire.messages:.0f} messages of"
        f" {size(wire.bytes / wire.messages)} on average cost beside their bytes{at.get(wire.known, '')}:"
        f" {gain / wire.messages:.2f} ms each, {met:.1f} ms of it for ranks to meet. Send them together.{unsure}",
        gain,
        two_standard_errors(exposed),
    )


@cause
def oversubscribed(facts: Facts) -> Finding | None:
    """More threads want to run than the host has cores."""
    load = max(facts.loads, key=lambda one: winsorized_mean(one.delay_ms), default=None)
    if load is None or not load.delay_ms:
        return None
    queue, crowd = winsorized_mean(load.delay_ms), 0.0
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
        two_standard_errors(load.delay_ms),
        # Too few cores for the ranks make all else longer, too; what other programs take is one cause among others.
        leads=not others or 0 < load.cores < len(load.ranks),
    )


@cause
def start_up(facts: Facts) -> Finding | None:
    """The first steps are most of the run."""
    start = facts.startup
    if not facts.whole_ms or start.extra_ms < _DOMINATES * facts.whole_ms:
        return None
    reasons = ", ".join(f"{words(phase)} {ms:.0f} ms" for phase, ms in start.causes[:3])
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
    gain = winsorized_mean(series)
    return Finding(
        "compute-bound",
        f"{gain:.1f} ms a step ({facts.share(gain)}) are encoding and decoding that no compute hides: a cheaper codec,"
        " or fewer gradients compressed.",
        gain,
        two_standard_errors(series),
    )


def _met(facts: Facts) -> float:
    """Ranks meet at every message: short waits in turn belong to many messages, those for a straggler do not."""
    wire = facts.wire
    if wire is None or wire.bits is None or wire.messages < _MANY:
        return 0.0
    if facts.late and facts.late[0].share >= _LATE_SHARE:
        return 0.0
    return min(winsorized_mean(facts.series("wait")), wire.messages * 2 * wire.latency_ms)


def _lower_middle(ranks: Sequence[Sequence[float]]) -> list[float]:
    """In each step that of the ranks' lower middle one: where only some have more, they are stragglers."""
    return [sorted(column)[(len(column) - 1) // 2] for column in zip(*ranks, strict=True)]
