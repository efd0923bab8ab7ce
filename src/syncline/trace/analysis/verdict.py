"""The verdict: the most expensive cause, or that all is fine, or why the trace does not show a cause."""

from collections.abc import Sequence

from syncline.stats import mean_or_zero
from syncline.trace.analysis.causes import CAUSES, Cause
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.steps import FEWEST
from syncline.trace.span import PHASES, TRAINING_LANES

MATTERS = 0.05
"""A cause with a smaller share of the step is left out."""
_MOSTLY = 0.6  # compute's share of a compute-bound step
_NEAR = 0.05  # share above the bound that counts as fine
_UNSEEN = 0.25  # share of a step in no lane that is too much for a verdict


def verdict(facts: Facts, causes: Sequence[Cause] = CAUSES) -> tuple[Finding, tuple[Finding, ...]]:
    """The verdict and all findings, the most expensive first."""
    if facts.steps < FEWEST:
        few = f"{facts.steps} steady step{'s' if facts.steps != 1 else ''}"
        return Finding("unclear", f"Too few steps to tell: {few}, at least {FEWEST} are needed."), ()
    found = [finding for one in causes if (finding := one(facts)) is not None]
    found = [finding for finding in found if finding.gain and finding.gain >= MATTERS * facts.step_ms]
    sure = [finding for finding in found if finding.gain > finding.doubt_ms]
    if not sure:
        return _otherwise(facts, found), ()
    most = max(finding.gain for finding in sure)
    sure.sort(key=lambda finding: (finding.leads and finding.gain > most / 2, finding.gain), reverse=True)
    return sure[0], tuple(sure)


def _otherwise(facts: Facts, doubtful: Sequence[Finding]) -> Finding:
    """The verdict if no cause is certain."""
    step, bound = f"{facts.step_ms:.1f} ms", facts.bound
    if doubtful:
        most = max(doubtful, key=lambda finding: finding.gain)
        return Finding(
            "unclear",
            f"The steps vary too much to tell: the largest cause ({most.kind}) costs {most.recoverable_ms:.1f} ms per"
            f" step, with an error of {most.doubt_ms:.1f} ms over {facts.steps} steps. Record more steps, on a quiet"
            " machine.",
        )
    if bound.compute_ms is None:
        return Finding("unclear", "The trace holds no compute, so nobody can say what hides what.")
    behind = mean_or_zero([mean_or_zero(series) for series in facts.hidden_by.get("data", {}).values()])
    if behind >= _UNSEEN * facts.step_ms:
        return Finding(
            "unclear",
            f"Ranks load data for {facts.ms('data'):.1f} ms per step ({facts.share(facts.ms('data'))}), and for"
            f" {behind:.1f} ms of that an exchange runs at the same time: without one of them the other shows. Do"
            " both: load ahead and send less.",
        )
    compute = sum(facts.ms(phase) for phase in TRAINING_LANES)
    if len(facts.ranks) > 1 and bound.distance is not None and bound.distance <= _NEAR:
        what = "compute" if bound.bound_ms == bound.compute_ms else "the network"
        return Finding(
            "fine",
            f"A step takes {step}, {max(0.0, bound.distance):.1%} above the bound of {bound.bound_ms:.1f} ms that"
            f" {what} sets: {facts.ms('exposed_exchange'):.1f} ms of exchange are visible, {facts.ms('wait'):.1f} ms"
            " are waits.",
            max(0.0, facts.step_ms - (bound.bound_ms or 0.0)),
        )
    beside = {phase: facts.ms(phase) for phase in PHASES if phase not in TRAINING_LANES}
    largest = max(beside, key=lambda phase: beside[phase])
    # If the training thread was blocked for a quarter of the step, the step is not compute-bound.
    if compute >= _MOSTLY * facts.step_ms and beside[largest] < _UNSEEN * facts.step_ms:
        return Finding(
            "compute-bound",
            f"{facts.share(compute)} of a step of {step} is compute (forward {facts.ms('forward'):.1f} ms, backward"
            f" {facts.ms('backward'):.1f} ms, update {facts.ms('update'):.1f} ms), and no other cause costs"
            f" {MATTERS:.0%} of it.{_slowest(facts)}",
        )
    rest = beside["other"]
    if rest >= _UNSEEN * facts.step_ms:
        return Finding(
            "unclear",
            f"{rest:.1f} ms of a step of {step} ({facts.share(rest)}) are in no recorded lane: record more of"
            " the loop.",
        )
    if bound.distance is not None and bound.distance > _NEAR:
        return Finding(
            "unclear",
            f"No known cause costs {MATTERS:.0%} of a step of {step}, but it is {bound.distance:.0%} above the"
            f" bound of {bound.bound_ms:.1f} ms: besides compute, most of it is {facts.words(largest)},"
            f" {beside[largest]:.1f} ms ({facts.share(beside[largest])}).",
        )
    return Finding("fine", f"No single cause costs {MATTERS:.0%} of a step of {step}.")


def _slowest(facts: Facts) -> str:
    """A sentence about what a GPU computes."""
    if facts.gpu is None or not facts.gpu.operators:
        return ""
    classes = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in list(facts.gpu.classes.items())[:3])
    first = facts.gpu.operators[0]
    return f" By class of kernel: {classes}; the first operator is {first.name}, {first.ms:.1f} ms."
