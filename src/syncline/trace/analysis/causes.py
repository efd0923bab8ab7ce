"""Causes of slow steps, one function each: from the facts of a trace to a finding with its evidence, or None.

A new cause: write a function here (or elsewhere) with the decorator `@cause`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest

from syncline.stats import mean_or_zero, two_standard_errors
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.gpu_use import HostRow
from syncline.trace.gpu_activity import BEFORE_FORWARD, DATA_LOADING, IDLE_KINDS, KERNEL_WAIT, OTHER_WAIT
from syncline.wording import scaled

_ALSO = 0.25  # of a late rank's excess: a phase with this much is named
_MANY = 4  # messages per step: with fewer, their number is not the problem
_DOMINATES = 0.5  # start-up's share of the run
_CROWDED = 0.05  # share of a step without a core: below this, the host has enough cores
_NAMED = 0.05  # of a cost: a smaller part of it is not named
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
    """One rank, or several together, join exchanges late, and the others wait for them."""
    late = facts.straggler
    if late is None:
        return None
    gains = late.gain_ms
    name, several = f"{late.name[0].upper()}{late.name[1:]}", len(late.ranks) > 1
    longer = sum(ms for ms in late.excess.values() if ms > 0)
    named = sorted((p for p, ms in late.excess.items() if ms >= _ALSO * longer > 0), key=lambda p: -late.excess[p])
    doubt = two_standard_errors(late.gains)
    if not named or facts.bound.compute_ms is None:
        unknown = (
            f"{name} {'are late together' if several else 'is the late one'} in {late.share:.0%} of all waits, by"
            f" {gains:.1f} ms per step ({facts.share(gains)}); the trace does not show what"
            f" {'they were' if several else 'it was'} doing."
        )
        return Finding("straggler", unknown, gains, doubt)
    gain = min(gains, sum(late.excess[phase] for phase in named))
    delayed_in = " and ".join(facts.words(phase) for phase in named)
    spent = {rank: sum(mean_or_zero(facts.phases[phase].get(rank, ())) for phase in named) for rank in facts.ranks}
    compared = ""
    if late.rank in spent:
        own, others = _apart(spent, late.ranks)
        compared = f" ({own:.1f} ms there, the others {others:.1f} ms)"
    own, others = _apart({rank: ms for load in facts.loads for rank, ms in load.by_rank.items()}, late.ranks)
    behind = own - others
    why = ""
    if behind > gain / 2:
        why = (
            f" {'Their threads wait' if several else 'Its thread waits'} {behind:.1f} ms longer for a core of the host."
        )
    moved = ""
    if late.delayed_ms >= _NAMED * late.wait_ms:
        joins = "they join" if several else "it joins"
        moved = f"; {late.delayed_ms:.1f} ms of that are transfers, visible only because {joins} late"
    sentence = (
        f"{name} {'are late together' if several else 'is late'}, delayed in {delayed_in}{compared}: the other ranks"
        f" wait {late.wait_ms:.1f} ms per step for {'them' if several else 'it'} ({facts.share(late.wait_ms)} of the"
        f" step, {late.share:.0%} of all waits{moved}).{why}"
    )
    return Finding("straggler", sentence, gain, doubt)


@cause
def in_turn(facts: Facts) -> Finding | None:
    """Ranks wait for one another in turn: a different one is late each time."""
    if not facts.late or facts.straggler is not None:
        return None
    # Without the delays a step is shorter by the sum of what the late ranks cost; with the same work spread evenly, by
    # the mean wait. Short waits at many messages count as latency.
    parts = zip_longest(facts.series("wait"), facts.pipeline_waits, facts.delayed_transfers, fillvalue=0.0)
    waits = [wait - pipeline + delayed for wait, pipeline, delayed in parts]
    wait_ms, delayed_ms = mean_or_zero(waits), mean_or_zero(facts.delayed_transfers)
    left = 1 - _joining(facts) / wait_ms if wait_ms else 0.0
    turns = zip(waits, *(late.gains for late in facts.late), strict=True)
    series = [left * max(wait, sum(gains)) for wait, *gains in turns]
    gain = mean_or_zero(series)
    shares = ", ".join(f"rank {late.rank} {late.share:.0%}" for late in facts.late[:4])
    moved = f", {delayed_ms:.1f} ms of it in transfers that start late" if delayed_ms >= _NAMED * wait_ms > 0 else ""
    return Finding(
        "unclear",
        f"Ranks wait {wait_ms:.1f} ms per step ({facts.share(wait_ms)}{moved}) for one another, and none is always"
        f" late ({shares}): uneven work, or other programs on the machine. Without these waits a step is {gain:.1f} ms"
        " shorter.",
        gain,
        two_standard_errors(series),
    )


@cause
def pipeline_bubble(facts: Facts) -> Finding | None:
    """Stages of a pipeline wait for one another's messages."""
    gain = mean_or_zero(facts.pipeline_waits)
    return Finding(
        "pipeline-bubble",
        f"Ranks wait {gain:.1f} ms per step ({facts.share(gain)}) for messages of other ranks that still compute, as"
        " the stages of a pipeline do: use more micro-batches, a schedule with a smaller bubble, or a better balance.",
        gain,
        two_standard_errors(facts.pipeline_waits),
    )


@cause
def input_bound(facts: Facts) -> Finding | None:
    """Most ranks wait for their input."""
    gain, loads, doubt, who = _lower("data", facts)
    each = ", ".join(f"rank {rank} {mean_or_zero(of):.1f}" for rank, of in list(facts.phases["data"].items())[:8])
    what, advice = "the data loader", "load ahead, use more workers, or do less work per sample"
    if not facts.loader_timed:
        what, advice = "copies of its input to the GPU", "copy ahead, from pinned memory with non_blocking=True"
    return Finding(
        "input-bound",
        f"{who('waits', 'wait')} {loads:.1f} ms per step ({facts.share(loads)}) for {what} ({each} ms):"
        f" {advice}.{_shown_instead(loads, gain)}",
        gain,
        doubt,
    )


@cause
def between_steps(facts: Facts) -> Finding | None:
    """Most ranks spend time between two steps in code that is not training."""
    gain, spent, doubt, who = _lower("between", facts)
    known = [f"{name} {ms:.1f} ms" for name, ms in facts.known_between.items() if ms >= _NAMED * spent]
    rest = spent - sum(facts.known_between.values())
    if rest >= _NAMED * spent:
        loader = (
            "" if facts.loader_timed else ", which may be a data loader that was not timed (use recording.data(loader))"
        )
        known.append(f"{rest:.1f} ms in code that is not recorded{loader}")
    return Finding(
        "between-steps",
        f"{who('spends', 'spend')} {spent:.1f} ms per step ({facts.share(spent)}) between the end of a step and the"
        f" next forward pass: {', '.join(known)}.{_shown_instead(spent, gain)}",
        gain,
        doubt,
    )


@cause
def long_steps(facts: Facts) -> Finding | None:
    """Something takes time in some steps only, such as validation or a checkpoint."""
    long = facts.long
    if long is None or long.count < 2:
        return None
    reasons = ", ".join(f"{facts.words(name)} {ms:.1f} ms" for name, ms in long.causes[:3])
    return Finding(
        "long-steps",
        f"{long.count} of {facts.steps + long.count} steady steps take {long.extra_ms:.1f} ms longer than the others"
        f" ({reasons}), {long.per_step_ms:.1f} ms per step on average. All other figures leave them out.",
        long.per_step_ms,
    )


@cause
def host_bound(facts: Facts) -> Finding | None:
    """The GPU is idle because the host launches its kernels too late."""
    if facts.gpu is None:
        return None
    series = _mean_of_ranks(list(facts.gpu.host_series.values()))
    gain = mean_or_zero(series)
    named = ", ".join(f"{row.doing} {row.ms:.1f} ms" for row in _not_loading(facts.gpu.gaps)[:3])
    kernels = sum(row.count for row in facts.gpu.kernels)
    advice = (
        "Launch fewer and larger kernels (torch.compile, CUDA graphs, larger batches, a fused optimizer), or do less in"
        " Python."
    )
    if facts.gpu.gaps and facts.gpu.gaps[0].doing == BEFORE_FORWARD:
        advice = "It may load data there without a DataLoader, or write logs: load ahead, or do that less often."
    return Finding(
        "host-bound",
        f"The GPU is idle for {gain:.1f} ms per step ({facts.share(gain)}) because the host launches its"
        f" {kernels:.0f} kernels too late. What the host does meanwhile: {named}. {advice}",
        gain,
        two_standard_errors(series),
    )


@cause
def sync_bound(facts: Facts) -> Finding | None:
    """The host waits for the GPU, and then the GPU for the host."""
    if facts.gpu is None or not facts.gpu.blocked:
        return None
    series = _mean_of_ranks(list(facts.gpu.sync_series.values()))
    gain, blocked = mean_or_zero(series), facts.gpu.blocked
    most = [row for row in blocked[:3] if row.ms >= blocked[0].ms / 10]
    named = ", ".join(f"{row.count:.0f} x {row.doing} {row.ms:.1f} ms" for row in most)
    return Finding(
        "sync-bound",
        f"The host waits {sum(row.ms for row in blocked):.1f} ms per step for the GPU in"
        f" {sum(row.count for row in blocked):.0f} calls ({named}), so it cannot launch ahead, and the GPU is then idle"
        f" for {gain:.1f} ms ({facts.share(gain)}). Read values less often (.item(), .cpu(), print, NaN checks), and"
        " copy from pinned memory with non_blocking=True.",
        gain,
        two_standard_errors(series),
    )


@cause
def gpu_idle(facts: Facts) -> Finding | None:
    """The GPU is idle though the host had launched its next kernel, or for a reason that the trace does not show."""
    if facts.gpu is None:
        return None
    series = _mean_of_ranks(list(facts.gpu.other_series.values()))
    gain = mean_or_zero(series)
    kinds = {kind: mean_or_zero([rank.idle_by_kind[kind] for rank in facts.gpu.ranks]) for kind in IDLE_KINDS}
    between, later = min(gain, kinds[KERNEL_WAIT]), min(gain, kinds[OTHER_WAIT])
    kernels = sum(row.count for row in facts.gpu.kernels)
    parts = {
        f"in short gaps between its {kernels:.0f} kernels, which fewer and larger kernels do not have (torch.compile,"
        " CUDA graphs)": between,
        "before kernels that were launched in time and started later, such as after a wait for another stream": later,
        "before kernels whose launches the trace does not show (profile with ProfilerActivity.CPU as well)": max(
            0.0, gain - between - later
        ),
    }
    named = "; ".join(f"{ms:.1f} ms {what}" for what, ms in parts.items() if ms >= _NAMED * gain)
    return Finding(
        "gpu-idle",
        f"The GPU is idle for {gain:.1f} ms per step ({facts.share(gain)}): {named}.",
        gain,
        two_standard_errors(series),
    )


@cause
def bandwidth_bound(facts: Facts) -> Finding | None:
    """Transfers that no compute hides, because of their bytes."""
    if facts.network is None:
        return None
    network, skew = facts.network, mean_or_zero(facts.transfer_waits)
    exposed = [a + b for a, b in zip_longest(facts.transfers(), facts.transfer_waits, fillvalue=0.0)]
    many = network.bits is not None and network.messages >= _MANY
    # A few messages cannot be made fewer, so all their time counts as bytes.
    gain = mean_or_zero(exposed) * (1 - network.latency_share if many else 1.0)
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
    later = f"; {skew:.1f} ms of it are waits for ranks where transfers end later" if skew >= _NAMED * gain else ""
    return Finding(
        "bandwidth-bound",
        f"{gain:.1f} ms per step ({facts.share(gain)}) are {what} that no compute hides:"
        f" {sized}{link}{rate}{hidden}{apart}{later}.",
        gain,
        two_standard_errors(exposed),
    )


@cause
def latency_bound(facts: Facts) -> Finding | None:
    """Many small messages, each with its latency."""
    network, exposed = facts.network, facts.transfers()
    if network is None or network.bits is None or network.messages < _MANY:
        return None
    joining = _joining(facts)
    gain = (mean_or_zero(exposed) * network.latency_share + joining) * (1 - 1 / network.messages)
    each = facts.issuing_ms / network.messages
    own = f", {each:.2f} ms of it to pack, start and unpack it" if facts.issuing_ms >= _NAMED * gain > 0 else ""
    unsure = "" if facts.waits_known else " Or they are waits for another rank."
    at = {"assumed": " (assuming a link of at least 100 Mbit/s)", "link": " (given the link's bandwidth)"}
    return Finding(
        "latency-bound",
        f"{gain:.1f} ms per step ({facts.share(gain)}) are the latency of {network.messages:.0f} messages of"
        f" {scaled(network.bytes / network.messages, 'B')} on average{at.get(network.known, '')}:"
        f" {gain / network.messages:.2f} ms each{own}, {joining:.1f} ms in total for ranks to join. Combine"
        f" them into fewer messages.{unsure}",
        gain,
        two_standard_errors(exposed),
    )


@cause
def oversubscribed(facts: Facts) -> Finding | None:
    """More threads are ready to run than the host has cores."""
    load = max(facts.loads, key=lambda one: mean_or_zero(one.delay_ms), default=None)
    if load is None or not load.delay_ms:
        return None
    queue, crowd = mean_or_zero(load.delay_ms), 0.0
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
    reasons = ", ".join(f"{facts.words(phase)} {ms:.0f} ms" for phase, ms in start.causes[:3])
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
    gain = mean_or_zero(series)
    return Finding(
        "compute-bound",
        f"{gain:.1f} ms per step ({facts.share(gain)}) are encoding and decoding that no compute hides: use a cheaper"
        " codec, or compress fewer gradients.",
        gain,
        two_standard_errors(series),
    )


def _apart(by_rank: Mapping[int, float], ranks: Collection[int]) -> tuple[float, float]:
    """The means over these ranks and over all others."""
    inside = [ms for rank, ms in by_rank.items() if rank in ranks]
    return mean_or_zero(inside), mean_or_zero([ms for rank, ms in by_rank.items() if rank not in ranks])


def _joining(facts: Facts) -> float:
    """Ms per step that ranks need to join many messages: short waits in turn; waits for a straggler do not count."""
    network = facts.network
    if network is None or network.bits is None or network.messages < _MANY:
        return 0.0
    if facts.straggler is not None:
        return 0.0
    return min(mean_or_zero(facts.series("wait")), network.messages * 2 * network.latency_ms)


def _lower(phase: str, facts: Facts) -> tuple[float, float, float, Callable[[str, str], str]]:
    """A phase that most ranks have: ms that can be gained, ms spent, the doubt, and a text that says who (verb forms).

    The part of an exchange that only this phase hides becomes visible without it.
    """
    by_rank, none = facts.phases[phase], (0.0,) * facts.steps
    hidden = {rank: facts.hidden_by.get(phase, {}).get(rank, none) for rank in by_rank}
    left = [[max(0.0, a - b) for a, b in zip(of, hidden[rank], strict=True)] for rank, of in by_rank.items()]
    series, spent = _lower_median(left), mean_or_zero(_lower_median(list(by_rank.values())))
    most = sum(mean_or_zero(of) >= spent / 2 for of in by_rank.values())

    def who(one: str, several: str) -> str:
        if most == len(by_rank):
            return f"Every rank {one}" if most > 1 else f"The rank {one}"
        return f"{most} of {len(by_rank)} ranks {several}"

    return mean_or_zero(series), spent, two_standard_errors(series), who


def _shown_instead(spent: float, gain: float) -> str:
    hidden = spent - gain
    return f" {hidden:.1f} ms of that hide an exchange, which would show instead." if spent > 1.01 * gain else ""


def _mean_of_ranks(ranks: Sequence[Sequence[float]]) -> list[float]:
    """In each step the mean over ranks."""
    return [mean_or_zero(column) for column in zip(*ranks, strict=True)]


def _not_loading(rows: Sequence[HostRow]) -> list[HostRow]:
    return [row for row in rows if row.doing != DATA_LOADING]


def _lower_median(ranks: Sequence[Sequence[float]]) -> list[float]:
    """In each step the lower median over ranks: if only some ranks have more, they are stragglers."""
    return [sorted(column)[(len(column) - 1) // 2] for column in zip(*ranks, strict=True)]
