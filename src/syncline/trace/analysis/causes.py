"""Causes of slow steps, one function each: from the facts of a trace to a finding with its evidence, or None.

A new cause: write a function here (or elsewhere) with the decorator `@cause`.
"""

from collections.abc import Callable, Sequence

from syncline.stats import mean_or_zero, two_standard_errors, winsorized_mean
from syncline.trace.analysis.findings import Facts, Finding, scaled, words

_LATE_SHARE = 0.65  # of all waits: below this, ranks wait for one another in turn
_ALSO = 0.25  # of a late rank's excess: a phase with this much is named
_MANY = 4  # messages per step: with fewer, their number is not the problem
_DOMINATES = 0.5  # start-up's share of the run
_CROWDED = 0.05  # share of a step without a core: below this, the host has enough cores
_OTHERS = 0.75  # of the cores that the ranks could use: if they use less, other programs use the rest

Cause = Callable[[Facts], Finding | None]
CAUSES: list[Cause] = []
"""All known causes; `cause` adds one."""


def cause(function: Cause) -> Cause:
    """Register a function that looks for a cause."""
    CAUSES.append(function)
    return function


@cause
def straggler(facts: Facts) -> Finding | None:
    """One rank joins exchanges late, and the others wait for it."""
    if not facts.late or facts.late[0].share < _LATE_SHARE:
        return None
    late = facts.late[0]
    gains = winsorized_mean(late.gains)
    longer = sum(ms for ms in late.excess.values() if ms > 0)
    named = sorted((p for p, ms in late.excess.items() if ms >= _ALSO * longer > 0), key=lambda p: -late.excess[p])
    doubt = two_standard_errors(late.gains)
    if not named or facts.bound.compute_ms is None:
        unknown = (
            f"Rank {late.rank} is the late one in {late.share:.0%} of all waits, by {gains:.1f} ms per step"
            f" ({facts.share(gains)}); the trace does not show what it was doing."
        )
        return Finding("straggler", unknown, gains, doubt)
    gain = min(gains, sum(late.excess[phase] for phase in named))
    delayed_in = " and ".join(words(phase) for phase in named)
    spent = {rank: sum(winsorized_mean(facts.phases[phase].get(rank, ())) for phase in named) for rank in facts.ranks}
    compared = ""
    if late.rank in spent:
        own = spent.pop(late.rank)
        compared = f" ({own:.1f} ms there, the others {mean_or_zero(list(spent.values())):.1f} ms)"
    queued = {rank: ms for load in facts.loads for rank, ms in load.by_rank.items()}
    behind = queued.pop(late.rank, 0.0) - mean_or_zero(list(queued.values()))
    why = f" Its thread waits {behind:.1f} ms longer for a core of its host." if behind > gain / 2 else ""
    sentence = (
        f"Rank {late.rank} is late, delayed in {delayed_in}{compared}: the other ranks wait {late.wait_ms:.1f} ms per"
        f" step for it ({facts.share(late.wait_ms)} of the step, {late.share:.0%} of all waits).{why}"
    )
    return Finding("straggler", sentence, gain, doubt)


@cause
def in_turn(facts: Facts) -> Finding | None:
    """Ranks wait for one another in turn: a different one is late each time."""
    if not facts.late or facts.late[0].share >= _LATE_SHARE:
        return None
    # Without the delays a step is shorter by the sum of what the late ranks cost; with the same work spread evenly, by
    # the mean wait. Short waits at many messages count as latency.
    waits = facts.series("wait")
    wait_ms = winsorized_mean(waits)
    left = 1 - _joining(facts) / wait_ms if wait_ms else 0.0
    turns = zip(waits, *(late.gains for late in facts.late), strict=True)
    series = [left * max(wait, sum(gains)) for wait, *gains in turns]
    gain = winsorized_mean(series)
    shares = ", ".join(f"rank {late.rank} {late.share:.0%}" for late in facts.late[:4])
    return Finding(
        "unclear",
        f"Ranks wait {wait_ms:.1f} ms per step ({facts.share(wait_ms)}) for one another, and none is always"
        f" late ({shares}): uneven work, or other programs on the machine. Without these waits a step is {gain:.1f} ms"
        " shorter.",
        gain,
        two_standard_errors(series),
    )


@cause
def input_bound(facts: Facts) -> Finding | None:
    """Most ranks wait for their input."""
    data, none = facts.phases["data"], (0.0,) * facts.steps
    loading = _lower_median(list(data.values()))
    hidden = {rank: facts.hidden_by_data.get(rank, none) for rank in data}
    # The part of an exchange that only loading hides becomes visible without it.
    series = _lower_median([[max(0.0, a - b) for a, b in zip(of, hidden[r], strict=True)] for r, of in data.items()])
    gain, loads = winsorized_mean(series), winsorized_mean(loading)
    each = ", ".join(f"rank {rank} {winsorized_mean(values):.1f}" for rank, values in list(data.items())[:8])
    slow = sum(winsorized_mean(values) >= loads / 2 for values in data.values())
    who = "Every rank waits" if slow == len(data) else f"{slow} of {len(data)} ranks wait"
    back = f" {loads - gain:.1f} ms of that hide an exchange, which would show instead." if loads > 1.01 * gain else ""
    return Finding(
        "input-bound",
        f"{who} {loads:.1f} ms per step ({facts.share(loads)}) for the data loader ({each} ms): load ahead, use"
        f" more workers, or do less work per sample.{back}",
        gain,
        two_standard_errors(series),
    )


@cause
def bandwidth_bound(facts: Facts) -> Finding | None:
    """Transfers that no compute hides, because of their bytes."""
    if facts.network is None:
        return None
    network, exposed = facts.network, facts.series("exposed_exchange")
    many = network.bits is not None and network.messages >= _MANY
    # A few messages cannot be made fewer, so all their time counts as bytes.
    gain = winsorized_mean(exposed) * (1 - network.latency_share if many else 1.0)
    what, apart = "bytes on the network", ""
    if network.bits is None:
        what, apart = "transfers", "; without sizes, bytes and latency cannot be separated"
    elif not many and network.latency_share and network.known == "assumed":
        what, apart = "transfers", "; with so few and small messages, bytes and latency cannot be separated"
    elif not many and network.latency_share * gain >= 0.05:
        what, apart = "transfers", f"; {gain * network.latency_share:.1f} ms of it are latency"
    what += "" if facts.waits_known else ", or waits for another rank,"
    rate = (
        f", {scaled(network.bytes * 8e3 / network.busy_ms, 'bit/s')} while they move"
        if network.bytes and network.busy_ms
        else ""
    )
    several = (
        f" ({scaled(network.wire_bytes, 'B')} to and from a rank)" if network.wire_bytes > 1.05 * network.bytes else ""
    )
    link = f"{several} over a link of {scaled(network.link, 'bit/s')}" if network.link else several
    number = f"{network.messages:.0f} message{'s' if round(network.messages) != 1 else ''}"
    sized = f"{scaled(network.bytes, 'B')} per step in {number}" if network.bytes else f"{number} of unknown size"
    hidden = f", {facts.communication:.0%} hidden" if facts.communication is not None else ""
    return Finding(
        "bandwidth-bound",
        f"{gain:.1f} ms per step ({facts.share(gain)}) are {what} that no compute hides:"
        f" {sized}{link}{rate}{hidden}{apart}.",
        gain,
        two_standard_errors(exposed),
    )


@cause
def latency_bound(facts: Facts) -> Finding | None:
    """Many small messages, each with its latency."""
    network, exposed = facts.network, facts.series("exposed_exchange")
    if network is None or network.bits is None or network.messages < _MANY:
        return None
    joining = _joining(facts)
    gain = (winsorized_mean(exposed) * network.latency_share + joining) * (1 - 1 / network.messages)
    unsure = "" if facts.waits_known else " Or they are waits for another rank."
    at = {"assumed": " (assuming a link of at least 100 Mbit/s)", "link": " (given the link's bandwidth)"}
    return Finding(
        "latency-bound",
        f"{gain:.1f} ms per step ({facts.share(gain)}) are the latency of {network.messages:.0f} messages of"
        f" {scaled(network.bytes / network.messages, 'B')} on average{at.get(network.known, '')}:"
        f" {gain / network.messages:.2f} ms each, {joining:.1f} ms in total for ranks to join. Combine"
        f" them into fewer messages.{unsure}",
        gain,
        two_standard_errors(exposed),
    )


@cause
def oversubscribed(facts: Facts) -> Finding | None:
    """More threads are ready to run than the host has cores."""
    load = max(facts.loads, key=lambda one: winsorized_mean(one.delay_ms), default=None)
    if load is None or not load.delay_ms:
        return None
    queue, crowd = winsorized_mean(load.delay_ms), 0.0
    if facts.on_gpu:
        # The host runs ahead of its GPU: a delay costs time only while the GPU is idle.
        queue = min(queue, facts.ms("other") + facts.ms("data"))
    elif len(facts.loads) == 1 and 0 < load.cores < len(load.ranks) and queue >= _CROWDED * facts.step_ms:
        # The cores also copy messages between ranks of one host; the time on a shaped link stays the same.
        on_link = facts.network.wire_ms if facts.network is not None and facts.network.link else None
        moved = max(0.0, facts.ms("exposed_exchange") - (on_link or 0.0))
        crowd = moved * (1 - load.cores / len(load.ranks))
    ranks = f"{len(load.ranks)} rank{'s' if len(load.ranks) != 1 else ''}"
    cores = f" on {load.cores} core{'s' if load.cores != 1 else ''}" if load.cores else ""
    busy = load.cpu_ms / facts.step_ms if load.cpu_ms is not None and facts.step_ms else 0.0
    used = f" The ranks use {busy:.1f} cores." if load.cores and busy else ""
    others = bool(load.cores) and busy < _OTHERS * min(load.cores, len(load.ranks))
    who = "Other programs take the cores from" if others else "The host has too few cores for"
    copies = f"; {crowd:.1f} ms more are messages, which the same cores copy" if crowd else ""
    return Finding(
        "oversubscribed",
        f"{who} its {ranks}{cores}: a training thread is ready to run but has no core for {queue:.1f} ms per step"
        f" ({facts.share(queue)}){copies}.{used}",
        min(queue + crowd, facts.step_ms),
        two_standard_errors(load.delay_ms),
        # Too few cores for the ranks make everything else longer; what other programs take is one cause among others.
        leads=not others or 0 < load.cores < len(load.ranks),
    )


@cause
def start_up(facts: Facts) -> Finding | None:
    """The first steps take most of the run."""
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
        f"{gain:.1f} ms per step ({facts.share(gain)}) are encoding and decoding that no compute hides: use a cheaper"
        " codec, or compress fewer gradients.",
        gain,
        two_standard_errors(series),
    )


def _joining(facts: Facts) -> float:
    """Ms per step that ranks need to join many messages: short waits in turn; waits for a straggler do not count."""
    network = facts.network
    if network is None or network.bits is None or network.messages < _MANY:
        return 0.0
    if facts.late and facts.late[0].share >= _LATE_SHARE:
        return 0.0
    return min(winsorized_mean(facts.series("wait")), network.messages * 2 * network.latency_ms)


def _lower_median(ranks: Sequence[Sequence[float]]) -> list[float]:
    """In each step the lower median over ranks: if only some ranks have more, they are stragglers."""
    return [sorted(column)[(len(column) - 1) // 2] for column in zip(*ranks, strict=True)]
