"""Simulate the steady step of a scenario, optionally with its timeline as spans."""

from collections.abc import Callable

from syncline.sim.steady.cycle import cycle
from syncline.sim.steady.program import Segment, program
from syncline.sim.steady.scenario import Outcome, Scenario
from syncline.trace.span import STEP, Span

_NS = 1_000_000_000


def simulate(scenario: Scenario, *, spans: bool = False, steps: int = 2) -> Outcome:
    """Simulate the steady state of training. `spans`: return `steps` steps as spans of rank 0, from time 0 and step 1.

    >>> from syncline.sim import Job, Layer, Transfer
    >>> layers = (Layer("first", 1.0, 2.0, needs=(0,)), Layer("second", 1.0, 2.0, needs=(1,)))
    >>> jobs = (Job(1, 1, 0.0, (Transfer(0.0, 5.0),)), Job(0, 0, 0.0, (Transfer(0.0, 1.0),)))
    >>> late = simulate(Scenario(layers, jobs, update=(0.0, 0.0)))
    >>> late.step, late.bound, late.waits
    (10.0, 6.0, (Wait(layer=0, unit=0, seconds=4.0),))
    """
    segments = program(scenario)
    notes: list[tuple[str, int, float, float]] = []
    step, waits = cycle(scenario, segments, (lambda *what: notes.append(what)) if spans else None)
    step = max(step, scenario.host)
    laid = _lay_out(scenario, segments, notes, step, steps) if spans else []
    return Outcome(step, scenario.compute, scenario.wire, tuple(waits), laid, scenario.host)


def _lay_out(
    s: Scenario, segments: list[Segment], notes: list[tuple[str, int, float, float]], step: float, steps: int
) -> list[Span]:
    """Repeat the cycle as spans. Work in flight from the step before the first one is included as step 0."""
    name = _namer(s, segments)
    first = next(begin for lane, _, begin, _ in notes if lane == "data")
    laid = [Span(0, STEP, STEP, "", n + 1, round(n * step * _NS), round((n + 1) * step * _NS)) for n in range(steps)]
    for number in range(steps + 1):
        shift = number * step - first
        for lane, at, begin, end in notes:
            on_thread = lane in ("data", "forward", "backward", "wait") or (lane == "update" and s.rival)
            of_next = on_thread and begin >= first and segments[at].kind != "backward"
            if end <= begin or end + shift <= 0 or begin + shift >= steps * step:
                continue
            title, unit = name(lane, at, on_thread)
            start, stop = (round(max(0.0, t + shift) * _NS) for t in (begin, end))
            laid.append(Span(0, lane, title, unit, number + of_next, start, stop))
    return sorted(laid, key=lambda span: (span.start, span.end, span.lane))


def _namer(s: Scenario, segments: list[Segment]) -> Callable[[str, int, bool], tuple[str, str]]:
    units = {unit: layer.name for layer in s.layers for unit in layer.needs}
    parts = [sum(job.unit == unit for job in s.jobs) for unit in range(len(s.update))]
    seen = [0] * len(s.update)
    labels = []
    for job in s.jobs:
        label = units.get(job.unit, f"unit {job.unit}")
        labels.append(f"{label}[{seen[job.unit]}]" if parts[job.unit] > 1 else label)
        seen[job.unit] += 1

    def name(lane: str, at: int, on_thread: bool) -> tuple[str, str]:
        if on_thread:
            return segments[at].name or lane, ""
        if lane == "update":
            return lane, units.get(at, f"unit {at}")
        return lane, labels[at]

    return name
