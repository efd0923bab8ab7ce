"""`syncline simulate`: predict a recorded run without its straggler, on another network, or with another codec."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.cli import session
from syncline.cli.app import new_app
from syncline.cli.output import print_json, say
from syncline.cluster.quantities import format_bandwidth, parse_bandwidth
from syncline.errors import UsageError
from syncline.report.figures import text_table

if TYPE_CHECKING:
    from syncline.cli.recorded_run import RecordedRun

NODES = (2, 4, 8, 16, 64, 256)
BANDWIDTHS = ("100Mbit", "200Mbit", "500Mbit", "1Gbit", "2.5Gbit", "5Gbit", "10Gbit", "25Gbit", "100Gbit")
PLOT = "sweep.html"
_HEADINGS = ("nodes", "bandwidth", "dense ms", "bf16 ms", "compressed ms", "codec", "")

app = new_app()


@app.command()
def simulate(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder or a trace; for other networks and codecs, one of syncline(auto, tune=full)."
        ),
    ],
    what: Annotated[
        str | None,
        typer.Option(
            help="Replay the trace with a change. A comma-separated list of no-straggler, infinite-network, 2x (or any"
            " factor of the bandwidth), perfect-overlap, codec=int8."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes; default: as recorded.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth of each node's link: 25Gbit; default: as recorded.")
    ] = None,
    compress: Annotated[
        str | None, typer.Option(help="One codec, or auto(int8, int4) for the best of them; default: all measured.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Tabulate and plot many nodes and bandwidths: where does compression pay?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")] = False,
    trust_files: session.Trust = False,
) -> None:
    """Predict the step of a recorded run if something were different, with the error of replaying it unchanged.

    --what replays the trace, and works with any trace. --nodes, --bandwidth, --compress and --sweep predict from cost
    curves, which a run of syncline(auto, tune=full) leaves.
    """
    from syncline.cli import recorded_run as r
    from syncline.cli import replay

    of_costs = {"--nodes": nodes, "--bandwidth": bandwidth, "--compress": compress, "--sweep": sweep or None}
    given = [name for name, value in of_costs.items() if value is not None]
    if what is not None and given:
        raise UsageError(f"--what replays the trace as it was recorded: leave {given[0]} out, or --what")
    if what is not None or not r.has_costs(run):
        if what is None and not replay.has_trace(run):
            r.find_run(run)  # its error says what is missing
        if given:
            raise UsageError(
                f"{given[0]} needs cost curves, which {run} does not hold: {r.FIX}, or ask the trace with --what"
            )
        facts = replay.answers(run, what)
        text = replay.text(facts)
    else:
        found = r.find_run(run)
        facts, text = (_sweep if sweep else _one_network)(found, nodes, bandwidth, compress)
        facts |= {"replay": found.replay(), "from": str(found.folder)}
        text += f"\n{r.replay_text(facts['replay'])}"
    if as_json:
        print_json(facts)
    else:
        say(text)


def _one_network(
    found: "RecordedRun", nodes: int | None, bandwidth: str | None, compress: str | None
) -> tuple[dict[str, Any], str]:
    """The best plan on one network, as plain data and as text."""
    from syncline.cli import recorded_run as r
    from syncline.plan.other_network import infinite

    where = found.network(nodes=nodes, bandwidth=bandwidth)
    choice = found.best_plan(where, compress)
    what_if = {
        "double_bandwidth_ms": found.step_ms(choice.plan, replace(where, bytes_per_s=2 * where.bytes_per_s)),
        "infinite_network_ms": found.step_ms(choice.plan, infinite(where)),
        "perfect_overlap_ms": choice.bound * 1e3,
    }
    network = found.network_facts(where, bandwidth)
    facts = {
        "network": network,
        "chosen": choice.plan.about["chosen"],
        "predicted_ms": choice.step * 1e3,
        "bound_ms": choice.bound * 1e3,
        "what_if": what_if,
        "alternatives": r.alternatives(choice),
        "why": choice.why,
        "plan": r.plan_facts(choice.plan),
    }
    lines = [
        f"{r.network_text(network)}: {choice.step * 1e3:.1f} ms per step with {facts['chosen']}",
        r.alternatives_text(choice),
        "the same plan with",
        f"  twice the bandwidth   {what_if['double_bandwidth_ms']:10.1f} ms",
        f"  an infinite network   {what_if['infinite_network_ms']:10.1f} ms",
        f"  perfect overlap       {what_if['perfect_overlap_ms']:10.1f} ms (the bound)",
        f"why: {choice.why}",
    ]
    return facts, "\n".join(lines)


def _sweep(
    found: "RecordedRun", nodes: int | None, bandwidth: str | None, compress: str | None
) -> tuple[dict[str, Any], str]:
    """All pairs of nodes and bandwidths (one of either if it is given), as plain data and as text."""
    from syncline.files import write_text
    from syncline.plan.other_network import stops_paying, sweep
    from syncline.plan.planner import ALWAYS
    from syncline.report.bench_pages import Table, sweep_page

    record = found.record
    allowed, only = found.codecs(compress)
    if only in ALWAYS:
        raise UsageError(f"a sweep predicts dense and bf16 anyway: give --compress a codec that is not {only}")
    bandwidths = BANDWIDTHS if bandwidth is None else (bandwidth,)
    pairs = [(count, bits) for count in (NODES if nodes is None else (nodes,)) for bits in bandwidths]
    networks = [found.network(nodes=count, bandwidth=bits) for count, bits in pairs]
    cells = sweep(record.shapes, record.costs, networks, compressed=allowed if only is None else [only])
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
    bytes_per_bit = networks[0].bytes_per_s / parse_bandwidth(pairs[0][1])  # as a collective sees a link
    pays = [
        {"nodes": ranks // found.per_node, "below": None if rate is None else rate / bytes_per_bit}
        for ranks, rate in stops_paying(cells).items()
    ]
    table = Table(_HEADINGS, [_cells(row) for row in rows])
    plot = found.folder / PLOT
    title = f"Step time over bandwidth: {record.strategy}, measured on {record.costs.world} ranks"
    try:
        write_text(sweep_page(rows, pays, table, title=title), plot)
    except OSError as error:
        raise UsageError(f"cannot write {plot}: {error.strerror}; copy the run to a folder of yours") from None
    shown = text_table(table.headings, table.rows, left=(5, 6))
    text = "\n".join([shown, _where_it_pays(pays, rows[-1]["bandwidth"]), f"plot: {plot}"])
    return {"rows": rows, "pays": pays, "plot": str(plot)}, text


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{row[key]:.1f}" for key in ("dense_ms", "bf16_ms", "ms"))
    pays = f"pays, {row['gain']:.2f}x" if row["pays"] else ""
    return (str(row["nodes"]), format_bandwidth(row["bandwidth"]), *times, row["codec"], pays)


def _where_it_pays(pays: list[dict[str, Any]], highest: float) -> str:
    """For each number of nodes, the bandwidth below which compression pays."""
    lines = ["compression beyond bf16 pays"]
    for entry in pays:
        below = entry["below"]
        said = f"up to {format_bandwidth(highest)} and beyond" if below is None else f"below {format_bandwidth(below)}"
        lines.append(f"  on {entry['nodes']} nodes: {'never here' if below == 0 else said}")
    return "\n".join(lines)
