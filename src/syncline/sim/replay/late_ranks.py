"""What if no rank were late: a slower rank's times become those of the typical rank."""

from collections import defaultdict

from syncline.sim.replay.graph import Graph
from syncline.sim.replay.run import Length
from syncline.sim.replay.thread import STALL


def even(graph: Graph) -> tuple[Length, dict[tuple[int, str], float]]:
    """Lengths for a replay, and by (rank, lane) how many milliseconds a step they are shorter.

    In each lane the typical rank is the one in the middle by its mean, of two the faster. A slower rank's longest step
    becomes as long as the typical one's longest, and so on down: jitter stays, and a delay in some of the steps goes
    like one in all of them.
    """
    totals: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: {rank: {} for rank in graph.threads})
    counted = sorted(set.intersection(*(set(steps) for steps in graph.steps.values())))
    wanted = set(counted)
    for rank, thread in graph.threads.items():
        for (step, lane), pieces in thread.of.items():
            if lane != STALL and step in wanted:
                totals[lane][rank][step] = sum(p.end - p.start for p in pieces)
    for work in graph.work:
        if work.lane != "exchange" and work.step in wanted:
            row = totals[work.kind][work.rank]
            row[work.step] = row.get(work.step, 0) + work.end - work.start
    factors: dict[tuple[int, str, int], float] = {}
    excess: dict[tuple[int, str], float] = {}
    for lane, ranks in totals.items():
        rows = {rank: [row.get(step, 0) for step in counted] for rank, row in ranks.items()}
        by_mean = sorted(rows, key=lambda rank: (sum(rows[rank]), rank))
        typical = by_mean[(len(by_mean) - 1) // 2]
        target = sorted(rows[typical])
        for rank in by_mean[by_mean.index(typical) + 1 :]:
            order = sorted(range(len(counted)), key=lambda n: (rows[rank][n], n))
            saved = 0
            for place, n in enumerate(order):
                was = rows[rank][n]
                if was > target[place]:
                    factors[rank, lane, counted[n]] = target[place] / was
                    saved += was - target[place]
            if saved:
                excess[rank, lane] = saved / len(counted) / 1e6

    def length(rank: int, lane: str, step: int, ns: float) -> float:
        return ns * factors.get((rank, lane, step), 1.0)

    return length, excess
