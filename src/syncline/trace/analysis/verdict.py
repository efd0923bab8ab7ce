"""The verdict: the cause that costs most, or that all is well, or that the trace does not allow to tell."""

from collections.abc import Sequence

from syncline.stats import mean_or_zero, winsorized_mean
from syncline.trace.analysis.causes import CAUSES, Cause
from syncline.trace.analysis.findings import Facts, Finding
from syncline.trace.analysis.limits import COMPUTE
from syncline.trace.analysis.wording import words
from syncline.trace.span import PHASES

FEWEST = 3
"""Steady steps below which nothing is said."""
MATTERS = 0.05
"""A cause that costs a smaller share of the step is left out."""
_MOSTLY = 0.6  # compute's share of a step that is called compute-bound
_NEAR = 0.05  # above the bound
_UNSEEN = 0.25  # of a step in no lane


def verdict(facts: Facts, causes: Sequence[Cause] = CAUSES) -> tuple[Finding, tuple[Finding, ...]]:
    """The verdict and all findings, the costliest first."""
    if facts.steps < FEWEST:
        few = f"{facts.steps} steady step{'s' if facts.steps != 1 else ''}"
        return Finding("unclear", f"Too few steps to tell: {few}, at least {FEWEST} are needed."), ()
    found = [finding for one in causes if (finding := one(facts)) is not None]
    found = [one for one in found if one.recoverable_ms and one.recoverable_ms >= MATTERS * facts.step_ms]
    sure = [finding for finding in found if (finding.recoverable_ms or 0.0) > finding.doubt_ms]
    most = max((finding.recoverable_ms or 0.0 for finding in sure), default=0.0)
    sure.sort(
        key=lambda finding: (
            finding.leads and (finding.recoverable_ms or 0.0) > most / 2,
            finding.recoverable_ms or 0.0,
        ),
        reverse=True,
    )
    if sure:
        return sure[0], tuple(sure)
    return _otherwise(facts, found), ()


def _otherwise(facts: Facts, doubtful: Sequence[Finding]) -> Finding:
    """No cause is certain."""
    step, bound = f"{facts.step_ms:.1f} ms", facts.bound
    if doubtful:
        most = max(doubtful, key=lambda finding: finding.recoverable_ms or 0.0)
        return Finding(
            "unclear",
            f"The steps vary too much to tell: the largest cause ({most.kind}) is {most.recoverable_ms:.1f} ms a step,"
            f" give or take {most.doubt_ms:.1f} ms over {facts.steps} steps. Record more steps, on a quiet machine.",
        )
    if bound.compute_ms is None:
        return Finding("unclear", "The trace holds no compute, so that nothing can be said of what hides what.")
    behind = mean_or_zero([winsorized_mean(series) for series in facts.behind_data.values()])
    if behind >= _UNSEEN * facts.step_ms:
        return Finding(
            "unclear",
            f"Ranks load data for {facts.ms('data'):.1f} ms a step ({facts.share(facts.ms('data'))}), and for"
            f" {behind:.1f} ms of that an exchange runs behind it: without one of them the other shows. Load ahead and"
            " send less, both.",
        )
    compute = sum(facts.ms(phase) for phase in COMPUTE)
    if len(facts.ranks) > 1 and bound.distance is not None and bound.distance <= _NEAR:
        what = "compute" if bound.bound_ms == bound.compute_ms else "the wire"
        return Finding(
            "fine",
            f"A step takes {step}, {max(0.0, bound.distance):.1%} above the bound of {bound.bound_ms:.1f} ms that"
            f" {what} sets: {facts.ms('exposed_exchange'):.1f} ms of exchange are visible, {facts.ms('wait'):.1f} ms"
            " are waits.",
            max(0.0, facts.step_ms - (bound.bound_ms or 0.0)),
        )
    beside = {phase: facts.ms(phase) for phase in PHASES if phase not in COMPUTE}
    largest = max(beside, key=lambda phase: beside[phase])
    # A quarter in which the training thread stood still is no compute, whatever the rest is.
    if compute >= _MOSTLY * facts.step_ms and (largest == "other" or beside[largest] < _UNSEEN * facts.step_ms):
        return Finding(
            "compute-bound",
            f"{facts.share(compute)} of a step of {step} is compute (forward {facts.ms('forward'):.1f} ms, backward"
            f" {facts.ms('backward'):.1f} ms, update {facts.ms('update'):.1f} ms), and no other cause costs"
            f" {MATTERS:.0%} of it.",
        )
    rest = beside["other"]
    if rest >= _UNSEEN * facts.step_ms:
        return Finding(
            "unclear",
            f"{rest:.1f} ms of a step of {step} ({facts.share(rest)}) lie in no recorded lane: record more of"
            " the loop.",
        )
    if bound.distance is not None and bound.distance > _NEAR:
        return Finding(
            "unclear",
            f"No known cause costs {MATTERS:.0%} of a step of {step}, and yet it is {bound.distance:.0%} above the"
            f" bound of {bound.bound_ms:.1f} ms: beside compute most of it is {words(largest)}, {beside[largest]:.1f}"
            f" ms ({facts.share(beside[largest])}).",
        )
    return Finding("fine", f"No single cause costs {MATTERS:.0%} of a step of {step}.")
