"""Rows and table of `bench overhead`, from the records of the ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

from syncline.bench.overhead.rank import PHASES
from syncline.bench.timing import Timing, ratios, summarize
from syncline.bench.training import compression
from syncline.spec import parse, parse_one
from syncline.stats import median

_TIMES = ("step", "cpu", "thread", "issue")


def row(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a way over all ranks: medians, quartiles, and ratios to DDP and differences from alone by round."""
    mine, ddp = ([record["ways"][way] for record in records] for way in (name, "ddp"))
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


def against_rival(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of a way to the best DDP that is comparable: `rival`, and step and CPU time by round."""
    rivals = rivals_of(name, records[0]["ways"])
    made: dict[str, Any] = {"way": name}
    for kind in ("step", "cpu"):
        times = {way: _pooled([record["ways"][way] for record in records], kind) for way in (name, *rivals)}
        if kind == "step":
            made["rival"] = min(rivals, key=lambda way: median(times[way]))
        made[kind] = summarize(ratios(times[name], times[made["rival"]]))
    return made


def issue_above(name: str, other: str, records: Sequence[dict[str, Any]]) -> Timing:
    """Milliseconds that a way takes longer than another one to issue a step; pairs of the same round."""
    mine, others = (_pooled([record["ways"][way] for record in records], "issue") for way in (name, other))
    return summarize([a - b for a, b in zip(mine, others, strict=True)])


def _pooled(records: Sequence[dict[str, Any]], kind: str) -> list[Any]:
    return [value for record in records for value in record[kind]]


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
