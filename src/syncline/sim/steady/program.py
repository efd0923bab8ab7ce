"""The training thread's work in one cycle, as a list of segments."""

from typing import NamedTuple

from syncline.sim.steady.scenario import Scenario

STEP = "step"
"""A segment without work: `optimizer.step()` is called here, and updates may start."""


class Segment(NamedTuple):
    """Uninterrupted compute. It first waits for the updates in `needs`; at its end the jobs in `released` are ready."""

    seconds: float
    needs: tuple[int, ...]
    released: tuple[int, ...]
    kind: str
    name: str = ""
    layer: int = -1


def program(s: Scenario) -> list[Segment]:
    """Backward, step, data, forward; a rival waits for everything and updates between backward and data."""
    released: list[list[int]] = [[] for _ in s.layers]
    for j, job in enumerate(s.jobs):
        released[job.ready].append(j)
    segments = [
        Segment(s.layers[i].backward, (), tuple(released[i]), "backward", s.layers[i].name, i)
        for i in range(len(s.layers) - 1, -1, -1)
    ]
    everything = tuple(range(len(s.update)))
    if s.rival:
        segments.append(Segment(sum(s.update), everything, (), "update"))
    else:
        segments.append(Segment(0.0, (), (), STEP))
    segments.append(Segment(s.data, (), (), "data"))
    segments += [Segment(a.forward, a.needs, (), "forward", a.name, i) for i, a in enumerate(s.layers)]
    touched = {unit for layer in s.layers for unit in layer.needs}
    if rest := tuple(unit for unit in everything if unit not in touched):
        segments.append(Segment(0.0, rest, (), "forward", "rest"))
    return segments
