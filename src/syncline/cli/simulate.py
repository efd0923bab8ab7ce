"""`syncline simulate`: what a recorded run would take without its straggler, on another network, with another codec."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli import source as s
from syncline.cli.execute import print_json
from syncline.cli.whatif import answered, has_costs, has_trace
from syncline.errors import UsageError
from syncline.plan.whatif import Setting, choose, infinite, outcome, stops_paying, sweep

NODES = (2, 4, 8, 16, 64, 256)
BANDWIDTHS = ("100Mbit", "200Mbit", "500Mbit", "1Gbit", "2.5Gbit", "5Gbit", "10Gbit", "25Gbit", "100Gbit")
PLOT = "sweep.svg"
_OF_COSTS = ("--nodes", "--bandwidth", "--compress", "--sweep")


def simulate(
    source: Annotated[
        Path, typer.Option("--from", help="A run folder or a trace; of syncline(auto) for other networks and codecs.")
    ],
    what: Annotated[
        str | None,
        typer.Option(
            help="Replay the trace: a comma list of no-straggler, infinite-network, 2x (or any factor of the"
            " bandwidth), perfect-overlap, codec=int8."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; default: as recorded.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of each node's link: 25Gbit; default: as recorded.")] = None,
    compress: Annotated[
        str | None, typer.Option(help="One codec, or auto(int8, int4): the best of them; default: all measured.")
    ] = None,
    over: Annotated[
        bool, typer.Option("--sweep", help="Tabulate and plot nodes by bandwidths: where does compression pay?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")] = False,
) -> None:
    """Say what a step of a recorded run would take if something were different, with the error of replaying it."""
    if what is not None or not has_costs(source):
        _replayed(source, what, (nodes, bandwidth, compress, over or None), as_json=as_json)
        return
    found = s.find(source)
    if over:
        told, text = _swept(found, nodes, bandwidth, compress)
    else:
        told, text = _asked(found, nodes, bandwidth, compress)
    replayed = s.replay(found)
    if as_json:
        print_json({**told, "replay": replayed, "from": str(found.folder)})
        return
    Console().print(f"{text}\n{s.replay_text(replayed)}", markup=False, highlight=False, soft_wrap=True)


def _replayed(source: Path, what: str | None, others: tuple[object, ...], *, as_json: bool) -> None:
    """From spans alone: nodes, other bandwidths than multiples, and codecs are nothing that they know."""
    given = [name for name, value in zip(_OF_COSTS, others, strict=True) if value is not None]
    if given and what is not None:
        raise UsageError(f"--what replays the trace as it was recorded: leave {given[0]} out, or --what")
    if what is None and not has_trace(source):
        s.find(source)  # its error says what is missing
    if given:
        raise UsageError(
            f"{given[0]} needs cost curves, which {source} does not hold: run syncline train --strategy"
            " 'syncline(auto)' first, or ask the trace with --what"
        )
    told, text = answered(source, what)
    if as_json:
        print_json(told)
        return
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _asked(
    found: s.Source, nodes: int | None, bandwidth: str | None, compress: str | None
) -> tuple[dict[str, Any], str]:
    """One network."""
    run = found.run
    where = s.setting(found, nodes=nodes, bandwidth=bandwidth)
    allowed, only = s.wanted(compress, run.costs)
    choice = choose(run.shapes, run.costs, where, allowed=allowed, only=only)

    def step(there: Setting) -> float:
        return outcome(choice.plan, run.shapes, run.costs, there).step * 1e3

    what_if = {
        "double_bandwidth_ms": step(replace(where, bytes_per_s=2 * where.bytes_per_s)),
        "infinite_network_ms": step(infinite(where)),
        "perfect_overlap_ms": choice.bound * 1e3,
    }
    network = s.network_facts(found, where, bandwidth)
    told = {
        "network": network,
        "chosen": choice.plan.about["chosen"],
        "predicted_ms": choice.step * 1e3,
        "bound_ms": choice.bound * 1e3,
        "what_if": what_if,
        "alternatives": s.alternatives(choice),
        "why": choice.why,
        "plan": s.plan_facts(choice.plan),
    }
    lines = [
        f"{s.network_text(network)}: {choice.step * 1e3:.1f} ms a step with {told['chosen']}",
        s.alternatives_text(choice),
        "the same plan with",
        f"  twice the bandwidth   {what_if['double_bandwidth_ms']:10.1f} ms",
        f"  an infinite network   {what_if['infinite_network_ms']:10.1f} ms",
        f"  perfect overlap       {what_if['perfect_overlap_ms']:10.1f} ms (the bound)",
        f"why: {choice.why}",
    ]
    return told, "\n".join(lines)


def _swept(
    found: s.Source, nodes: int | None, bandwidth: str | None, compress: str | None
) -> tuple[dict[str, Any], str]:
    """All pairs; --nodes or --bandwidth narrow it to one of them."""
    from syncline.cli import sweep as show
    from syncline.cluster.quantities import parse_bandwidth
    from syncline.files import write_text

    run = found.run
    allowed, only = s.wanted(compress, run.costs)
    compressed = allowed if only is None else [only]
    if only in s.ALWAYS:
        raise UsageError(f"a sweep weighs dense and bf16 anyway: give --compress a codec that is not {only}")
    bandwidths = BANDWIDTHS if bandwidth is None else (bandwidth,)
    pairs = [(count, bits) for count in (NODES if nodes is None else (nodes,)) for bits in bandwidths]
    settings = [s.setting(found, nodes=count, bandwidth=bits) for count, bits in pairs]
    cells = sweep(run.shapes, run.costs, settings, compressed=compressed)
    rows: list[dict[str, Any]] = [
        {
            "nodes": count,
            "bandwidth": parse_bandwidth(bits),
            "dense_ms": cell.dense * 1e3,
            "bf16_ms": cell.bf16 * 1e3,
            "ms": cell.compressed * 1e3,
            "codec": cell.codec,
            "gain": cell.gain,
            "pays": cell.pays,
        }
        for (count, bits), cell in zip(pairs, cells, strict=True)
    ]
    # Of a link's bits a collective sees so many bytes.
    share = settings[0].bytes_per_s / parse_bandwidth(pairs[0][1])
    ends = stops_paying(cells)
    pays = [
        {"nodes": ranks // found.per_node, "below": None if rate is None else rate / share}
        for ranks, rate in ends.items()
    ]
    plot = found.folder / PLOT
    title = f"Step time over bandwidth: {run.strategy}, measured on {run.costs.world} ranks"
    try:
        write_text(show.svg(rows, pays, title=title), plot)
    except OSError as error:
        raise UsageError(f"cannot write {plot}: {error.strerror}; copy the run to a folder of yours") from None
    text = "\n".join([show.table(rows), show.verdict(pays, max(r["bandwidth"] for r in rows)), f"plot: {plot}"])
    return {"rows": rows, "pays": pays, "plot": str(plot)}, text
