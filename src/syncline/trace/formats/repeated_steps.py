"""Steps of a trace that does not mark them: found by work that repeats, such as the optimizer's step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

OPTIMIZER_STEP = "Optimizer.step"
"""How the names of the optimizer's steps start in a torch.profiler trace."""

_ALIKE = 0.8  # least share of common work of two steps
_COVERED = (0.95, 0.8)  # shares of the trace's work and time in steps that are alike: with few or some odd steps
_PER_COUNT = 3  # names with the same count that are tried as the start of a step
_MAX_NAMES = 400
_SAMPLE = 9


class Event(NamedTuple):
    """Work of the training thread (or of the GPU) with a name."""

    start: int
    end: int
    name: str


def repeated_steps(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Start and end of each step, from events in time order that do not overlap; empty if nothing repeats.

    A step ends with the optimizer's step, if the events have it once in each. Otherwise it starts with the name that
    divides the events into the most parts that are alike. Layers of a model repeat too, but the long parts between the
    last layer and the first one of the next step are not like a layer.
    """
    ends = [number + 1 for number, event in enumerate(events) if event.name.startswith(OPTIMIZER_STEP)]
    for least in _COVERED:
        for bounds in chain([[0, *ends]], _candidates(events)):
            if steps := _steps(events, bounds, least):
                return steps
    return []


def _candidates(events: Sequence[Event]) -> Iterator[list[int]]:
    """Places at which steps may start, and the end: by the most frequent name first, then by the first in the trace."""
    places: dict[str, list[int]] = {}
    for number, event in enumerate(events):
        places.setdefault(event.name, []).append(number)
    tried: Counter[int] = Counter()
    names = sorted(
        (found for found in places.values() if 1 < len(found) <= len(events) / 2), key=lambda p: (-len(p), p[0])
    )
    for found in names[-_MAX_NAMES:]:
        tried[len(found)] += 1
        if tried[len(found)] <= _PER_COUNT:
            yield [*found, len(events)]


def _steps(events: Sequence[Event], bounds: Sequence[int], least: float) -> list[tuple[int, int]]:
    """The parts between these places that are like the one of median size, if they cover at least this share."""
    parts = list(pairwise(bounds))
    if len(parts) < 2:
        return []
    sample = parts[len(parts) // 3 :][:_SAMPLE]
    first, *others = [Counter(event.name for event in events[begin:end]) for begin, end in sample]
    if sum(_share_in_common(first, other) >= _ALIKE for other in others) < len(others) / 2:
        return []  # most candidates end here, without a look at all of the trace
    work = [Counter(event.name for event in events[begin:end]) for begin, end in parts]
    starts = [events[begin].start for begin, _ in parts]
    ends = [*starts[1:], events[bounds[-1] - 1].end]
    # Of two parts the first is whole, while the last may be cut off.
    typical = sorted(range(len(parts) - 1), key=lambda place: work[place].total())[(len(parts) - 1) // 2]
    same = [place for place in range(len(parts)) if _share_in_common(work[place], work[typical]) >= _ALIKE]
    counted = len(parts)
    if ends[-1] - starts[-1] < _ALIKE * (ends[typical] - starts[typical]):
        counted -= 1  # cut off
        same = [place for place in same if place < counted]
    in_time = sum(ends[place] - starts[place] for place in same)
    in_count = sum(work[place].total() for place in same)
    enough_time = in_time >= least * (ends[counted - 1] - starts[0])
    enough_work = in_count >= least * (bounds[counted] - bounds[0])
    return [(starts[place], ends[place]) for place in same] if len(same) > 1 and enough_time and enough_work else []


def _share_in_common(one: Counter[str], other: Counter[str]) -> float:
    return 2 * (one & other).total() / (one.total() + other.total())
