"""The event loop of the simulator: one training cycle, from the start of a backward pass to the start of the next.

When a backward pass starts, nothing is in flight, because the forward pass before it has waited for every update. So
one cycle is exactly the steady state, without a warm-up. Written for speed: one function, state in local variables.
"""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from syncline.sim.steady.program import STEP, Segment
from syncline.sim.steady.scenario import Scenario, Wait

Note = Callable[[str, int, float, float], None]
"""Called with a lane, the index of the segment, job or unit, and start and end."""

_COMPUTED, _ENCODED, _LANDED, _RESUMED, _DECODED, _UPDATED = range(6)
_NEVER = math.inf


def cycle(s: Scenario, program: list[Segment], note: Note | None = None) -> tuple[float, list[Wait]]:
    """Seconds of one cycle, and the waits of the training thread."""
    jobs, update, rival, pipelined = s.jobs, s.update, s.rival, s.pipelined
    contention, drag = s.contention, s.drag
    # Slowdown of a computation that runs alone, minus the contention that each other computation adds.
    pace = 1 - contention
    count, units, last = len(jobs), len(update), len(program)
    now = 0.0
    events: list[tuple[float, int, int]] = []  # (time, kind, index)
    # Computations run on their own clock, which slows down while several compute and while the network is busy.
    # Without contention and drag they are plain events.
    busy: list[tuple[float, int, int]] = events if contention == 0 and drag == 0 else []
    busy_clock, busy_since, busy_next = 0.0, 0.0, _NEVER
    # Active transfers share the network equally: (network clock at the end, round).
    wires: list[tuple[float, int]] = []
    wire_clock, wire_since, wire_next = 0.0, 0.0, _NEVER
    depth = max([len(job.rounds) for job in jobs], default=0)
    queue = [[j for j in range(count) if len(jobs[j].rounds) > r] for r in range(depth)]
    issued, sent = [0] * depth, [0] * depth  # how many of each round's queue have been issued, and have been sent
    at = [0] * count  # current round of each job
    stage = [0] * count  # 1: waiting for its turn, 2: its latency has passed
    ready, begun = [False] * count, [0.0] * count
    free, following = s.lanes, 0
    parts = [0] * units
    for job in jobs:
        parts[job.unit] += 1
    done = [rival and not n for n in parts]
    started = [0.0] * units
    stepped, tasks = False, deque(u for u in range(units) if not parts[u] and not rival)
    place, blocked, stood, since = 0, set[int](), 0.0, 0.0
    waits: list[Wait] = []

    def busy_start(seconds: float, kind: int, index: int) -> None:
        nonlocal busy_clock, busy_since, busy_next
        if busy is events:
            heappush(events, (now + seconds, kind, index))
            return
        if busy:
            busy_clock += (now - busy_since) / (pace + contention * len(busy))
        busy_since = now
        heappush(busy, (busy_clock + seconds, kind, index))
        busy_next = now + (busy[0][0] - busy_clock) * (pace + contention * len(busy))

    def dragged(by: float) -> None:
        """The network has become busy or idle."""
        nonlocal busy_clock, busy_since, busy_next, pace
        if busy is not events and busy:
            busy_clock += (now - busy_since) / (pace + contention * len(busy))
            busy_since = now
            busy_next = now + (busy[0][0] - busy_clock) * (pace + by + contention * len(busy))
        pace += by

    def wire_start(j: int, r: int) -> None:
        nonlocal wire_clock, wire_since, wire_next
        if wires:
            wire_clock += (now - wire_since) / len(wires)
        elif drag:
            dragged(drag)
        wire_since = now
        heappush(wires, (wire_clock + jobs[j].rounds[r].wire, r))
        wire_next = now + (wires[0][0] - wire_clock) * len(wires)

    def issue(r: int) -> None:
        """Issue the next jobs of round r: one at a time, or all that have arrived if pipelined."""
        line, turn = queue[r], issued[r]
        while turn < len(line) and (pipelined or turn == sent[r]):
            j = line[turn]
            if at[j] != r or stage[j] != 1:
                break
            turn += 1
            begun[j] = now
            latency = jobs[j].rounds[r].latency
            if latency:
                stage[j] = 0
                heappush(events, (now + latency, _LANDED, j))
            else:
                stage[j] = 2
                if line[sent[r]] == j:
                    wire_start(j, r)
        issued[r] = turn

    def take() -> None:
        """Free lanes take the next launch of the order if it is ready, else a pending update."""
        nonlocal free, following
        while free:
            if following < count and ready[following]:
                begun[following] = now
                busy_start(jobs[following].encode, _ENCODED, following)
                following += 1
            elif stepped and tasks:
                unit = tasks.popleft()
                started[unit] = now
                busy_start(update[unit], _UPDATED, unit)
            else:
                return
            free -= 1

    def advance() -> None:
        """The training thread continues with the segment at `place`, or waits for its units."""
        nonlocal place, stepped, tasks, stood, since
        while place < last:
            seconds, needs, released, kind = program[place][:4]
            if kind == STEP:
                stepped = True
                tasks = deque(sorted(tasks))  # the optimizer's order
                take()
                place += 1
                continue
            for unit in needs:
                if not done[unit]:
                    blocked.add(unit)
            if blocked:
                stood = now
                return
            if note is None:  # run several segments at once if nothing can happen between them
                while not released and place + 1 < last:
                    more, needs, then, kind = program[place + 1][:4]
                    if kind == STEP or (needs and not all(done[unit] for unit in needs)):
                        break
                    seconds += more
                    released = then
                    place += 1
            since = now
            busy_start(seconds, _COMPUTED, 0)
            return

    def finish(unit: int) -> None:
        done[unit] = True
        if unit in blocked:
            blocked.remove(unit)
            if not blocked:
                if now > stood:
                    waits.append(Wait(program[place].layer, unit, now - stood))
                    if note is not None:
                        note("wait", place, stood, now)
                advance()

    def complete(j: int) -> None:
        """A job has decoded. Its lane continues with the unit's update if that is pending."""
        nonlocal free
        unit = jobs[j].unit
        parts[unit] -= 1
        if not parts[unit] and stepped:
            started[unit] = now
            busy_start(update[unit], _UPDATED, unit)
            return
        free += 1
        if not parts[unit]:
            if rival:
                finish(unit)
            else:
                tasks.append(unit)
        take()

    advance()
    while place < last:
        if events and events[0][0] <= wire_next and events[0][0] <= busy_next:
            now, kind, index = heappop(events)
        elif busy_next <= wire_next:
            now = busy_next
            busy_clock, kind, index = heappop(busy)
            busy_since = now
            busy_next = now + (busy[0][0] - busy_clock) * (pace + contention * len(busy)) if busy else _NEVER
        else:
            now = wire_next
            assert now < _NEVER, "the simulated engine is stuck"
            wire_clock, r = heappop(wires)
            wire_since = now
            wire_next = now + (wires[0][0] - wire_clock) * len(wires) if wires else _NEVER
            if drag and not wires:
                dragged(-drag)
            line = queue[r]
            index = line[sent[r]]
            sent[r] += 1
            if note is not None:
                note("exchange", index, begun[index], now)
            if sent[r] < len(line):
                j = line[sent[r]]
                if at[j] == r and stage[j] == 2:
                    wire_start(j, r)
                else:
                    issue(r)
            at[index] = r + 1
            stage[index] = 0
            begun[index] = now
            job = jobs[index]
            if r + 1 < len(job.rounds):
                if job.between:
                    busy_start(job.between, _RESUMED, index)
                else:
                    stage[index] = 1
                    issue(r + 1)
            elif job.decode:
                busy_start(job.decode, _DECODED, index)
            else:
                complete(index)
            continue
        if kind == _LANDED:
            stage[index] = 2
            r = at[index]
            if queue[r][sent[r]] == index:
                wire_start(index, r)
        elif kind == _COMPUTED:
            segment = program[place]
            if note is not None:
                note(segment.kind, place, since, now)
            if segment.released:
                for index in segment.released:
                    ready[index] = True
                take()
            place += 1
            advance()
        elif kind == _UPDATED:
            if note is not None:
                note("update", index, started[index], now)
            free += 1
            finish(index)
            take()
        elif kind == _DECODED:
            if note is not None:
                note("decode", index, begun[index], now)
            complete(index)
        else:  # encoded or resumed
            if note is not None:
                note("encode", index, begun[index], now)
            if jobs[index].rounds:
                stage[index] = 1
                issue(at[index])
            elif jobs[index].decode:
                begun[index] = now
                busy_start(jobs[index].decode, _DECODED, index)
            else:
                complete(index)
    return now, waits
