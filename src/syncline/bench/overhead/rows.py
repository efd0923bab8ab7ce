"""Rows and table of `bench overhead`, from the records of the ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from syncline.bench.overhead.rank import PHASES
from syncline.bench.timing import Timing, ratios, summarize
from syncline.bench.training import compression
from syncline.spec import parse, parse_one
from syncline.stats import median

_TIMES = ("step", "cpu", "thread", "issue")


def row(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a way over all ranks: medians, quartiles, and ratios to DDP and differences from alone by round."""
    mine, ddp = _ways(name, records), _ways("ddp", records)
    alone = [record["ways"].get("alone") for record in records]
    made: dict[str, Any] = {"way": name, "loss": mine[0]["loss"], "plan": mine[0]["plan"]}
    made |= {"ratio_to_ddp": {}, "above_alone_ms": {}}
    for kind in _TIMES:
        if not mine[0][kind]:
            continue
        made[f"{kind}_ms"] = summarize(_pooled(mine, kind))
        made["ratio_to_ddp"][kind] = summarize(ratios(_pooled(mine, kind), _pooled(ddp, kind)))
        if alone[0] is not None:
            pairs = zip(_pooled(mine, kind), _pooled(alone, kind), strict=True)
            made["above_alone_ms"][kind] = summarize([a - b for a, b in pairs])
    for kind in ("phases", "issue_phases"):
        columns = list(zip(*_pooled(mine, kind), strict=True))
        if columns:
            made[f"{kind}_ms"] = {p: summarize(c) for p, c in zip(PHASES, columns, strict=True)}
    if mine[0]["kept_busy"]:
        busy = _pooled(mine, "kept_busy")
        made["kept_busy"] = sum(busy) / len(busy)
    if alone[0] is None or not mine[0]["memory"]:
        return made
    gradient = records[0]["gradient_bytes"]
    here, there = mine[0]["memory"], alone[0]["memory"]
    made["memory_bytes"] = here
    made["memory_above_alone_of_gradients"] = {
        moment: (here[moment] - (0 if moment == "state" else there[moment])) / gradient for moment in here
    }
    return made


RIVALS = {"syncline": ("ddp",), "syncline(bf16)": ("ddp-bf16",), "syncline(auto)": ("ddp", "ddp-bf16")}
"""By way: the kinds of DDP that send gradients of the same quality. The rival is the best of all their bucket sizes."""


def rivals_of(name: str, ways: Iterable[str]) -> list[str]:
    """The ways that send gradients of the same quality: for `powersgd`, torch's hook of the same rank.

    >>> rivals_of("syncline(powersgd(rank=32) | bf16)", ["ddp", "ddp-powersgd(rank=4)", "ddp-powersgd(rank=32)"])
    ['ddp-powersgd(rank=32)']
    """
    if name in RIVALS:
        return [way for way in ways if parse_one(way).name in RIVALS[name]]
    first, *_ = parse(compression(name) or "")
    same = (f"ddp-{first.name}", first.kwargs.get("rank"))
    return [way for way in ways if (parse_one(way).name, parse_one(way).kwargs.get("rank")) == same]


Records = Sequence[Mapping[str, Any]]
"""What the ranks of one start have measured."""


def against_rival(name: str, starts: Sequence[Records]) -> dict[str, Any]:
    """Ratios of a way to the best DDP that is comparable: `rival`, and step and CPU time by round.

    The best DDP is found in one half of the starts and compared in the other half, for each half (of the rounds, if
    there was one start). Where memory lies makes equal ways differ in all rounds of a start: of several equally fast
    bucket sizes, the lucky one would else be the rival.
    """
    rivals = rivals_of(name, starts[0][0]["ways"])
    halves = _halves(starts)
    best = [min(rivals, key=lambda way: median(_values(half, way, "step"))) for half in halves]
    made: dict[str, Any] = {"way": name, "rival": " / ".join(dict.fromkeys(best))}
    for kind in ("step", "cpu"):
        made[kind] = summarize(
            [
                ratio
                for rival, half in zip(reversed(best), halves, strict=True)
                for ratio in ratios(*(_values(half, way, kind) for way in (name, rival)))
            ]
        )
    return made


_Half = list[tuple[Records, Sequence[int]]]
"""Starts, each with the numbers of its rounds that count."""


def _halves(starts: Sequence[Records]) -> tuple[_Half, _Half]:
    """The starts in two halves; a single one by its rounds, such that both halves have rounds of either order."""
    whole: _Half = [(records, range(len(records[0]["ways"]["ddp"]["step"]))) for records in starts]
    if len(starts) > 1:
        return whole[::2], whole[1::2]
    ((_, rounds),) = whole
    length = 2 if len(rounds) >= 4 else 1
    first = [number for number in rounds if number // length % 2 == 0]
    second = [number for number in rounds if number not in first] or first
    return [(starts[0], first)], [(starts[0], second)]


def _values(half: _Half, way: str, kind: str) -> list[Any]:
    return [value for records, rounds in half for value in _pooled(_ways(way, records), kind, rounds)]


def issue_above(name: str, other: str, records: Sequence[dict[str, Any]]) -> Timing:
    """Milliseconds that a way takes longer than another one to issue a step; pairs of the same round."""
    mine, others = (_pooled(_ways(way, records), "issue") for way in (name, other))
    return summarize([a - b for a, b in zip(mine, others, strict=True)])


def _ways(name: str, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [record["ways"][name] for record in records]


def _pooled(ways: Sequence[dict[str, Any]], kind: str, rounds: Sequence[int] | None = None) -> list[Any]:
    """The values of all ranks, of these rounds or of all."""
    return [value for way in ways for value in (way[kind] if rounds is None else [way[kind][n] for n in rounds])]


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: on CUDA also the time to issue a step and the peak of memory."""
    cuda = result["setting"]["device"] == "cuda"
    columns = ["way", "step ms", "/ddp", "CPU ms", "/ddp", "issue ms" if cuda else "thread ms", "/ddp"]
    columns += ["+mem step", "+mem wait", *(["+mem peak"] if cuda else []), "state"]
    return columns, [_cells(line) for line in result["rows"]]


def _cells(line: dict[str, Any]) -> list[str]:
    """The cells of a row: median and half the interquartile range; memory in multiples of the gradients."""
    texts = [line["way"]]
    for kind in ("step", "cpu", "issue" if "issue_ms" in line else "thread"):
        time = line[f"{kind}_ms"]
        texts += [f"{time['median']:.1f} ±{(time['high'] - time['low']) / 2:.1f}"]
        texts += [f"{line['ratio_to_ddp'][kind]['median']:.2f}"]
    return texts + [f"{value:.2f}x" for value in line["memory_above_alone_of_gradients"].values()]


def console_table(result: dict[str, Any], *, width: int = 120) -> Any:
    """The table for a terminal; a narrow one has no spread. Needs rich."""
    from syncline.report.tables import simple_table

    title = f"overhead: {result['setting']['model']}, {result['tensors']} tensors, {result['setting']['device']}"
    wide = width >= 120
    heads, rows = table(result)
    rows = [[text if wide else text.partition(" ±")[0] for text in cells] for cells in rows]
    return simple_table(title, heads, rows, fold=not wide)
