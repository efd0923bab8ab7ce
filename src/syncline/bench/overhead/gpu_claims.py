"""`bench overhead --never-slower --device cuda`: attached models against torch's own, on a GPU that two ranks share.

First the network is free: ResNet-50 with small batches (161 tensors), GPT-2 small and ViT-B/16, as large as published.
Step, time to issue a step, and memory are compared with DDP, and PowerSGD with torch's own PowerSGD hook. Then
ResNet-50 trains on links from 200 Mbit/s on, where `auto` is compared with the best DDP.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.bench.output import markdown_table
from syncline.bench.overhead.rank import run_rank
from syncline.bench.overhead.rows import against_rival, issue_above, row
from syncline.bench.ranks import Progress, default_options, ranks_started, result_of
from syncline.bench.timing import Timing, summarize
from syncline.bench.training import Options
from syncline.cluster.quantities import parse_bandwidth
from syncline.errors import UsageError
from syncline.report.bench_pages import Table, networks_page
from syncline.report.figures import plural

UNSHAPED = "unshaped"
RESNET, GPT2, VIT = "resnet50", "gpt2(size=small)", "vit(size=b16)"
DENSE, AUTO = "syncline", "syncline(auto)"
LOW_RANK = ("syncline(powersgd(rank=4))", "syncline(powersgd(rank=32) | bf16)")
HOOKS = ("ddp-powersgd(rank=4)", "ddp-powersgd(rank=32)")
STEP, HOOK, ISSUE_MS = 1.01, 1.05, 0.5
"""Limits: a step relative to DDP's and to torch's PowerSGD hook; milliseconds to issue a step, above DDP's."""
OLD_ISSUE_MS = 145.0
"""What PowerSGD of rank 4 took to issue ResNet-50's step before launches were captured: a third of it is allowed."""
DENSE_MEMORY, LOW_RANK_MEMORY = 0.3, 2.2
"""Most memory above training alone at the peak, in sizes of the gradients."""
COMMAND = "python -m syncline.bench.overhead --never-slower --device cuda"
NETWORK = 1.0
"""Limit of `auto` on a shaped link, relative to the best DDP."""


@dataclass(frozen=True)
class GpuCell:
    """A setting in which all ways are compared."""

    model: str
    data: str
    batch: int = 8
    bandwidth: str = ""
    ddp: tuple[str, ...] = ("ddp", "ddp-bf16")
    blocks: int = 6
    steps: int = 8
    issue_steps: int = 6
    warm_up: int = 4
    seconds: float = 15.0
    """Time for the blocks, and as much for the steps whose issue time is measured."""

    @property
    def network(self) -> str:
        """The network, in words."""
        return self.bandwidth or UNSHAPED

    @property
    def ways(self) -> tuple[str, ...]:
        """All ways that are compared; on a shaped link, `auto` and DDP."""
        return (*self.ddp, AUTO) if self.bandwidth else ("alone", *self.ddp, *HOOKS, DENSE, AUTO, *LOW_RANK)


SMALL = "synthetic(image_size=32)"
FREE = (
    GpuCell(RESNET, SMALL),
    GpuCell(GPT2, "synthetic", steps=4, seconds=20.0),
    GpuCell(VIT, "synthetic", steps=4),
)
SHAPED = (
    *(GpuCell(RESNET, SMALL, bandwidth=rate, blocks=5, steps=6) for rate in ("30Gbit", "10Gbit", "5Gbit")),
    GpuCell(RESNET, SMALL, bandwidth="1Gbit", blocks=3, steps=3, warm_up=2),
    GpuCell(RESNET, SMALL, bandwidth="200Mbit", blocks=2, steps=2, warm_up=1),
)


def chosen(model: str | None = None, bandwidth: str | None = None) -> list[GpuCell]:
    """The cells of this model and of this link (`unshaped`: the free network); None: of all."""
    found = [cell for cell in (*FREE, *SHAPED) if model in (None, cell.model) and bandwidth in (None, cell.network)]
    if not found:
        cells = ", ".join(f"{cell.model} {cell.network}" for cell in (*FREE, *SHAPED))
        raise UsageError(f"no cell has model '{model}' and network '{bandwidth}': choose from {cells}")
    return found


def measure(
    cells: Sequence[GpuCell], *, progress: Progress = print, before: Mapping[str, Any] | None = None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Run these cells: rows of all ways, and one line per claim. `save` gets the result after each cell.

    Other cells are kept as they are in `before`, the result of an earlier run on the same machine.
    """
    began = time.perf_counter()
    result: dict[str, Any] = dict(before or {})
    for cell in cells:
        progress(f"{cell.model}, {cell.network}")
        with ranks_started(run_rank, _options(cell), progress) as (records, _, busy):
            rows = [row(name, records) for name in cell.ways]
            place = {"model": cell.model, "network": cell.network}
            facts = {"batch": cell.batch, "busy_before": round(busy, 3), "measured": time.strftime("%Y-%m-%d %H:%M")}
            sizes = {"gradient_bytes": records[0]["gradient_bytes"], "tensors": records[0]["tensors"]}
            mine = {**place, **facts, **sizes, "rows": rows, "claims": claims_of(cell, records, rows)}
        others = [one for one in result.get("cells", []) if {key: one[key] for key in place} != place]
        order = [(one.model, one.network) for one in (*FREE, *SHAPED)]
        found = sorted([*others, mine], key=lambda one: order.index((one["model"], one["network"])))
        claims = [{**_place(one), **claim} for one in found for claim in one["claims"]]
        result = result_of("overhead", _options(cell), claims, busy=busy, cells=found)
        result |= {"command": COMMAND, "seconds": time.perf_counter() - began}
        del result["setting"]  # cells have their own
        save(result)
    return result


def _place(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": cell["model"], "network": cell["network"]}


def _options(cell: GpuCell) -> Options:
    asked = {"model": cell.model, "data": cell.data, "batch": cell.batch, "bandwidth": cell.bandwidth}
    asked |= {"blocks": cell.blocks, "steps": cell.steps, "warm_up": cell.warm_up, "memory": not cell.bandwidth}
    asked |= {"seconds": cell.seconds}
    return default_options("cuda", cell.ways, {**asked, "issue_steps": 0 if cell.bandwidth else cell.issue_steps})


def claims_of(cell: GpuCell, records: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per claim about this cell."""
    by_way = {line["way"]: line for line in rows}

    def claim(way: str, against: str, value: Timing, limit: float) -> dict[str, Any]:
        return {"way": way, "against": against, "value": value, "limit": limit, "held": value["median"] <= limit}

    made = []
    for way in (AUTO,) if cell.bandwidth else (DENSE, AUTO, *LOW_RANK):
        line = against_rival(way, [records])
        limit = NETWORK if cell.bandwidth else HOOK if way in LOW_RANK else STEP
        made.append(claim(way, f"step of {line['rival']}", line["step"], limit))
    if cell.bandwidth:
        return made
    made.append(claim(DENSE, "issue ms above ddp", issue_above(DENSE, "ddp", records), ISSUE_MS))
    if cell.model == RESNET:
        limit = OLD_ISSUE_MS / 3
        made += [claim(way, "issue ms", by_way[way]["issue_ms"], limit) for way in LOW_RANK]
    for way in (DENSE, *LOW_RANK):
        peak = by_way[way]["memory_above_alone_of_gradients"]["peak"]
        limit = DENSE_MEMORY if way == DENSE else LOW_RANK_MEMORY
        made.append(claim(way, "peak memory above alone, in gradients", summarize([peak]), limit))
    return made


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: one line per claim."""
    lines = []
    for claim in result["rows"]:
        value = claim["value"]
        spread = f"{value['low']:.2f}-{value['high']:.2f}"
        where = [claim["model"], claim["network"], claim["way"], claim["against"]]
        held = "yes" if claim["held"] else "no"
        lines.append([*where, f"{value['median']:.3f}", spread, f"{claim['limit']:.2f}", held])
    return ["model", "network", "way", "figure", "value", "quartiles", "limit", "held"], lines


def markdown(result: dict[str, Any]) -> str:
    """The tables of a page of the documentation: each cell of the free network, the links, and all claims."""
    free, links = [], []
    for cell in result["cells"]:
        if cell["network"] == UNSHAPED:
            free.append(markdown_table([cell["model"], *_COLUMNS], [_of_free(line) for line in cell["rows"]]))
        else:
            by_way = {line["way"]: line for line in cell["rows"]}
            steps = [f"{line['step_ms']['median']:.1f}" for line in cell["rows"]]
            links.append([cell["network"], *steps, _spread(cell["claims"][0]["value"]), _plan(by_way[AUTO])])
    heads = ["link", *(f"{way}, ms" for way in SHAPED[0].ways), "`auto` / best DDP", "plan of `auto`"]
    by_link = [markdown_table(heads, links)] if links else []
    return "\n\n".join([*free, *by_link, markdown_table(*table(result))])


_COLUMNS = ("step ms", "of DDP's", "quartiles", "issue ms", "+mem peak", "plan")


def _of_free(line: dict[str, Any]) -> list[str]:
    """Issue times are in brackets where the device was idle in some of the steps."""
    ratio, issue = line["ratio_to_ddp"]["step"], f"{line['issue_ms']['median']:.1f}"
    exact = line["kept_busy"] >= 0.9
    spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
    peak = f"{line['memory_above_alone_of_gradients']['peak']:.2f}x"
    texts = [f"{line['step_ms']['median']:.1f}", f"{ratio['median']:.2f}", spread, issue if exact else f"({issue})"]
    return [f"`{line['way']}`", *texts, peak, _plan(line)]


def _spread(value: Timing) -> str:
    return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def _plan(line: dict[str, Any]) -> str:
    """Executor, units and codecs of a plan in words."""
    plan = line["plan"]
    if not plan:
        return ""
    codecs = "" if plan["codecs"] == "none" else f", {plan['codecs']}"
    return f"{plan['executor']}, {plural(plan['units'], 'unit')}{codecs}"


def page(result: dict[str, Any]) -> str:
    """The HTML page: steps over the bandwidth of the links, and the table."""
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in result["cells"]:
        if cell["network"] != UNSHAPED:
            for line in cell["rows"]:
                point = float(parse_bandwidth(cell["network"])), line["step_ms"]["median"]
                points.setdefault(line["way"], []).append(point)
    bad = frozenset(at for at, claim in enumerate(result["rows"]) if not claim["held"])
    return networks_page(result, points, Table(*table(result), bad))
